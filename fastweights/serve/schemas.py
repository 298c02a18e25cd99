"""What requests and replies look like: OpenAI's fields, as far as this server has a meaning for them.

Fields that would change the answer and that the server cannot honor are refused (`UNSUPPORTED`); all other unknown
fields are ignored.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, FiniteFloat, model_validator

from fastweights.serve.errors import ApiError

MAX_CHOICES = 128
MAX_STOPS = 16
MAX_TOP_LOGPROBS = 20
_INT64 = 2**63

# Fields that the server cannot honor, and the values with which they ask for nothing.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_calls": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "logit_bias": ({},),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "min_tokens": (0,),
    "ignore_eos": (False,),
    "stop_token_ids": ([],),
    "response_format": ({"type": "text"},),
    "text": ({}, {"format": {"type": "text"}}),
    "web_search_options": (),
    "echo": (False,),
    "suffix": ("",),
    "best_of": (1,),
    "background": (False,),
    "conversation": (),
    "context_management": ([],),
}

# What OpenAI's APIs call the number of new tokens. A request that has another one's field would get an answer of any
# length.
LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")


def _encodable(text: str) -> str:
    """JSON can write half of a surrogate pair, which is no character."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError("must not have unpaired surrogates") from error
    return text


Text = Annotated[str, AfterValidator(_encodable)]
# Parts of a message's content, all of which are text.
TextType = Literal["text", "input_text", "output_text"]


class Body(BaseModel):
    """A request's JSON. Strict: "1" is no number."""

    model_config = ConfigDict(strict=True, extra="ignore")
    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = UNSUPPORTED

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, data: Any) -> Any:
        for name, harmless in cls.unsupported.items() if isinstance(data, dict) else ():
            value = data.get(name)
            if name not in cls.model_fields and value is not None and value not in harmless:
                raise ApiError(f"{name} is not supported by this server: leave it out", 400, name, "unsupported")
        return data


class StreamOptions(Body):
    """Options of a stream."""

    include_usage: bool | None = None


class Generation(Body):
    """What all requests for text have in common."""

    model: Annotated[Text | None, Field(description="The served model's name; by default it.")] = None
    stream: bool | None = False
    temperature: Annotated[FiniteFloat, Field(ge=0, le=2, description="0: greedy.")] | None = 1.0
    top_p: Annotated[FiniteFloat, Field(ge=0, le=1)] | None = 1.0
    top_k: Annotated[int, Field(ge=-1, lt=_INT64, description="0 or -1: all tokens.")] | None = 0
    seed: Annotated[int, Field(ge=-_INT64, lt=_INT64)] | None = None
    stop: (
        Annotated[Text, Field(min_length=1, max_length=1000)]
        | Annotated[list[Annotated[Text, Field(min_length=1, max_length=1000)]], Field(max_length=MAX_STOPS)]
        | None
    ) = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_other_limits(cls, data: Any) -> Any:
        for name in LIMITS if isinstance(data, dict) else ():
            if name not in cls.model_fields and data.get(name) is not None:
                own = next(limit for limit in LIMITS if limit in cls.model_fields)
                raise ApiError(f"{name} is not a field of this request: use {own}", 400, name, "unsupported")
        return data

    @property
    def stops(self) -> list[str]:
        """The texts that end the answer."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []


Tokens = Annotated[int, Field(ge=0, lt=_INT64)]
Choices = Annotated[int, Field(ge=1, le=MAX_CHOICES)]
TokenIds = Annotated[list[Tokens], Field(min_length=1)]


class CompletionRequest(Generation):
    """The body of POST /v1/completions."""

    prompt: Annotated[
        Text
        | TokenIds
        | Annotated[list[Text], Field(min_length=1, max_length=MAX_CHOICES)]
        | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_CHOICES)],
        Field(description="A text, the tokens of one, or several of these."),
    ]
    max_tokens: Tokens | None = 16
    n: Choices | None = 1
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    stream_options: StreamOptions | None = None


class TextPart(Body):
    """A part of a message's content."""

    type: TextType
    text: Text


class Message(Body):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Text | list[TextPart]


class ChatRequest(Generation):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: Tokens | None = None
    max_completion_tokens: Tokens | None = None
    n: Choices | None = 1
    logprobs: bool | None = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    stream_options: StreamOptions | None = None


class InputMessage(Message):
    """A message of the input of a response."""

    type: Literal["message"] = "message"


class ResponseRequest(Generation):
    """The body of POST /v1/responses."""

    unsupported = UNSUPPORTED | {"prompt": (), "n": (1,)}

    input: Text | Annotated[list[InputMessage], Field(min_length=1)]
    instructions: Text | None = None
    previous_response_id: Annotated[Text, Field(max_length=200)] | None = None
    store: Annotated[bool | None, Field(description="Keep the state, so that a later request can continue.")] = True
    max_output_tokens: Tokens | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    include: list[Text] | None = None
    metadata: (
        Annotated[
            dict[Annotated[Text, Field(max_length=64)], Annotated[Text, Field(max_length=512)]], Field(max_length=16)
        ]
        | None
    ) = None


# Replies


class CachedTokens(BaseModel):
    """How many tokens of a prompt did not have to be read."""

    cached_tokens: int


class Usage(BaseModel):
    """Tokens of a completion."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class CompletionLogprobs(BaseModel):
    """Log-probabilities of a completion, one of each for each token."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    """One continuation."""

    index: int
    text: str
    finish_reason: Literal["stop", "length"]
    logprobs: CompletionLogprobs | None = None


class Completion(BaseModel):
    """The reply of POST /v1/completions."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class TopLogprob(BaseModel):
    """A token that could have been chosen."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """A token that was chosen."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """Log-probabilities of an answer."""

    content: list[TokenLogprob]


class ChatMessage(BaseModel):
    """An answer."""

    role: Literal["assistant"] = "assistant"
    content: str


class ChatChoice(BaseModel):
    """One answer and why it ended."""

    index: int
    message: ChatMessage
    finish_reason: Literal["stop", "length"]
    logprobs: ChatLogprobs | None = None


class ChatCompletion(BaseModel):
    """The reply of POST /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class InputDetails(CachedTokens):
    """How many tokens of the input did not have to be read, and how many were read into a stored state."""

    cache_write_tokens: int


class OutputDetails(BaseModel):
    """This server has no hidden reasoning."""

    reasoning_tokens: int = 0


class ResponseUsage(BaseModel):
    """Tokens of a response. The input is the whole conversation before the answer."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails = OutputDetails()
    total_tokens: int


class OutputText(BaseModel):
    """The text of an answer."""

    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[Any] = []
    logprobs: list[TokenLogprob] = []


class OutputMessage(BaseModel):
    """An answer."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    status: Literal["in_progress", "completed", "incomplete"]
    content: list[OutputText]


class IncompleteDetails(BaseModel):
    """Why an answer is incomplete."""

    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseObject(BaseModel):
    """The reply of POST /v1/responses, and a stored response."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: dict[str, Any] | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, str] = {}
    model: str
    output: list[OutputMessage]
    parallel_tool_calls: bool = False
    previous_response_id: str | None = None
    store: bool
    temperature: float | None = None
    tool_choice: Literal["none"] = "none"
    tools: list[Any] = []
    top_p: float | None = None
    usage: ResponseUsage | None = None


class Deleted(BaseModel):
    """The reply of DELETE /v1/responses/{id}."""

    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class StateReply(BaseModel):
    """The reply of POST /v1/states."""

    id: str
    object: Literal["state"] = "state"
    tokens: Annotated[int, Field(description="The number of tokens that the state has read.")]


class ModelCard(BaseModel):
    """The served model."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "fastweights"


class ModelList(BaseModel):
    """The reply of GET /v1/models."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class Info(BaseModel):
    """The reply of GET /v1/info."""

    model: str
    state_bytes: Annotated[int, Field(description="Bytes of the state of one conversation.")]
    base_kv_bytes_per_token: Annotated[int, Field(description="Bytes of the base model's KV cache for each token.")]
    max_length: Annotated[int | None, Field(description="Tokens of the longest conversation. null: no limit.")]
    chat_template: Annotated[bool, Field(description="Whether the tokenizer has a chat template.")]
    slots: int


class Health(BaseModel):
    """The reply of GET /health."""

    status: Literal["ok", "failed"]
