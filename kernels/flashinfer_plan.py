"""Plans of a FlashInfer wrapper, none overwritten by the next. Called by `attention_prefill.py` and `attention_prompt.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class Planner:
    """Makes a wrapper's plans.

    A wrapper fills the same pinned memory for each plan and enqueues its copy to the device without waiting for it. Chunks of a prompt are
    enqueued faster than they are computed: the copy of one chunk's plan still stands in the stream, behind the chunk before it, when the
    next plan is made. It would then be copied instead, and the earlier chunk would look for the later one's keys, past the end of its own
    block table. So a plan waits for the copy of the one before.

    `make_event`: of the device; tests have others
    """

    def __init__(self, wrapper: Any, make_event: Callable[[], Any] = torch.cuda.Event):
        self._wrapper = wrapper
        self._make_event = make_event
        self._copied: Any = None

    def plan(self, *arguments: Any, **options: Any) -> None:
        """The wrapper's own `plan`.

        Effects: waits until the device has come to the copy of the last plan; work enqueued after that goes on meanwhile; not capturable
        """
        if self._copied is not None:
            self._copied.synchronize()
        self._wrapper.plan(*arguments, **options)
        self._copied = self._copied or self._make_event()
        self._copied.record()
