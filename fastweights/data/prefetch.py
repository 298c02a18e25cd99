"""Items that are prepared in a thread while the caller works on those before them."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Key = TypeVar("Key")
Item = TypeVar("Item")


def prefetch(make: Callable[[Key], Item], keys: Iterable[Key], ahead: int = 2) -> Generator[Item, None, None]:
    """Yield make(key) for each key, in order. A thread makes up to `ahead` items before they are asked for.

    An error of `make` is raised where its item is asked for. Close the generator (contextlib.closing) to end the thread
    after the item that it is making; the items that it has not begun are not made.

    Args:
        make: Makes an item. It is called in one other thread, for one key after another.
        keys: The keys. They are read as items are asked for.
        ahead: How many items are made or being made at a time.
    """
    left = iter(keys)
    pool = ThreadPoolExecutor(1, thread_name_prefix="prefetch")
    try:
        waiting: deque[Future[Item]] = deque(pool.submit(make, key) for key in itertools.islice(left, ahead))
        while waiting:
            item = waiting.popleft().result()
            waiting.extend(pool.submit(make, key) for key in itertools.islice(left, 1))
            yield item
    finally:
        pool.shutdown(cancel_futures=True)
