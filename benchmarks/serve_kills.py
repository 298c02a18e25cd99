"""kill -9 at random moments: two servers on one folder, clients that talk to them, and what is left of it.

    python benchmarks/serve_kills.py [--kills 100] [--seed 0] [--out results/serving_kills.json]

tests/helpers/server_kills.py has the servers and the clients, and says what is counted. With a tiny model, on a CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
TESTS = str(ROOT / "tests")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "serving_kills.json")
    options = parser.parse_args()
    # The processes of the servers import the helpers, too.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [TESTS, os.environ.get("PYTHONPATH")]))
    sys.path.insert(0, TESTS)
    from helpers.server_kills import CLIENTS, SERVERS, Kills

    from fastweights.utils.provenance import write_result

    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        counts = Kills(Path(folder), options.seed).run(options.kills)
    result = {
        "what": "servers on one folder, killed with kill -9 under load: responses that can be continued",
        "seed": options.seed,
        "servers": SERVERS,
        "clients": CLIENTS,
        "seconds": round(time.monotonic() - started, 1),
        "counts": counts,
    }
    write_result(options.out, result)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
