"""Requests that schemathesis makes of the OpenAPI document: valid ones and ones with single mistakes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest
import schemathesis
from helpers.server import MODEL, make_engine, serving
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
    unsupported_method,
]
EXAMPLES = 25


OPERATIONS = [
    "POST /v1/completions", "POST /v1/chat/completions", "POST /v1/responses", "GET /v1/responses/{response_id}",
    "DELETE /v1/responses/{response_id}", "GET /v1/states/{response_id}", "POST /v1/states", "GET /v1/models",
    "GET /v1/models/{model}", "GET /v1/info", "GET /health", "GET /metrics",
]  # fmt: skip


@pytest.fixture(scope="module")
def operations() -> Iterator[dict[str, Any]]:
    """The operations in the document of a running server."""
    with serving(make_engine(slots=4), max_tokens=3) as running:
        schema = schemathesis.openapi.from_url(f"{running.url}/openapi.json")
        yield {operation.label: operation for operation in (found.ok() for found in schema.get_all_operations())}


@pytest.mark.parametrize("mode", list(GenerationMode))
@pytest.mark.parametrize("label", OPERATIONS)
def test_replies_are_as_documented(operations: dict[str, Any], label: str, mode: GenerationMode) -> None:
    assert set(operations) == set(OPERATIONS)

    @hypothesis.settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(case=operations[label].as_strategy(generation_mode=mode))
    def check(case: Any) -> None:
        case.call_and_validate(checks=CHECKS, timeout=30)

    try:
        check()
    except hypothesis.errors.Unsatisfiable:  # some paths have nothing that could be wrong
        assert mode is GenerationMode.NEGATIVE


def test_document_names_the_errors_of_each_path() -> None:
    with serving(keys=("key",)) as running:
        document = json.loads(json.dumps(running.app.openapi()))
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses"):
        replies = document["paths"][path]["post"]["responses"]
        assert {"200", "400", "401", "404", "413", "429"} <= set(replies) and "422" not in replies
        assert {"application/json", "text/event-stream"} == set(replies["200"]["content"])
        assert document["paths"][path]["post"]["security"]
    assert MODEL not in json.dumps(document)
