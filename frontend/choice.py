"""One choice of a running request: token ids in, what the client may see out.

Owns the order of things between parser and client: stop strings act on visible content only, held text is flushed
before anything else is sent, log probabilities go with their tokens' text: held with it, cut with it. Called by `frontend.generation`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from common.proto import types_pb2
from frontend.chat_format import ContentDelta, Event, Finish, FinishReason, ReplyParser
from frontend.stop_strings import StopStrings


@dataclass(frozen=True, slots=True)
class VisibleToken:
    """A token of the visible answer and its log probabilities."""

    token_id: int
    logprobs: types_pb2.TokenLogprobs


@dataclass(slots=True)
class ChoiceUpdate:
    """What one chunk of ids added to choice `index`."""

    index: int
    events: list[Event]
    visible: Sequence[VisibleToken] = ()
    token_ids: Sequence[int] = ()


class Choice:
    """State of one choice. After `finish`, or after a stop string, it takes no more."""

    def __init__(self, index: int, parser: ReplyParser, stops: Sequence[str]):
        self.index = index
        self.num_tokens = 0
        self.is_finished = False
        self._parser = parser
        self._stops = StopStrings(stops)
        self._has_stops = bool(stops)
        self._message_index = 0
        self._seen = self._sent = 0  # characters of visible text
        self._held: deque[tuple[int, int, VisibleToken]] = deque()  # where a token's text starts and ends

    @property
    def is_satisfied(self) -> bool:
        """Nothing that the engine still sends for this choice can matter."""
        return self.is_finished or self._parser.is_done

    def feed(self, token_ids: Sequence[int], logprobs: Sequence[types_pb2.TokenLogprobs] = ()) -> ChoiceUpdate:
        """Events of these ids. A completed stop string ends the choice: the last event is then `Finish`."""
        if self.is_finished:
            return ChoiceUpdate(self.index, [], (), token_ids)
        self.num_tokens += len(token_ids)
        if len(logprobs) != len(token_ids):
            events = self._filter(self._parser.feed(token_ids))
        else:
            events = []
            for token_id, logprob in zip(token_ids, logprobs, strict=True):
                was_visible, start = self._parser.is_in_content, self._seen
                events += self._filter(self._parser.feed((token_id,)))
                if was_visible and self._parser.is_in_content:
                    self._held.append((start, self._seen, VisibleToken(token_id, logprob)))
        visible = self._release() if self._held else ()
        if self._stops.matched is not None:
            events.append(self._finish_at_stop())
        return ChoiceUpdate(self.index, events, visible, token_ids)

    def finish(self, reason: FinishReason) -> ChoiceUpdate:
        """The engine is done with this choice; the last event is `Finish`, unless it was sent before."""
        if self.is_finished:
            return ChoiceUpdate(self.index, [])
        events = self._parser.finish(reason)
        last = events.pop()
        sent = self._filter(events)
        if self._stops.matched is not None and isinstance(last, Finish):
            last = replace(last, reason="stop")
        self.is_finished = True
        sent += self._flush()
        return ChoiceUpdate(self.index, [*sent, last], self._release())

    def _finish_at_stop(self) -> Finish:
        last = self._parser.finish("stop")[-1]
        self.is_finished = True
        repairs = last.repairs if isinstance(last, Finish) else {}
        reasoning = last.num_reasoning_tokens if isinstance(last, Finish) else 0
        return Finish("stop", False, repairs, reasoning)

    def _release(self) -> list[VisibleToken]:
        """Tokens whose text has been sent; once a stop string has cut the text, those too whose beginning has, and the rest is dropped."""
        visible = []
        while self._held and self._held[0][1] <= self._sent:
            visible.append(self._held.popleft()[2])
        if self._stops.matched is not None:
            visible += [token for start, _, token in self._held if start < self._sent]
            self._held.clear()
        return visible

    def _filter(self, events: list[Event]) -> list[Event]:
        if not self._has_stops:
            return events
        sent: list[Event] = []
        for event in events:
            if self._stops.matched is not None:
                break
            if not isinstance(event, ContentDelta):
                sent += self._flush()
                sent.append(event)
                continue
            if event.message_index != self._message_index:
                sent += self._flush()
                self._message_index = event.message_index
            text = self._stops.push(event.text)
            self._seen += len(event.text)
            self._sent += len(text)
            if text:
                sent.append(ContentDelta(text, event.message_index))
        return sent

    def _flush(self) -> list[Event]:
        text = self._stops.flush()
        self._sent += len(text)
        return [ContentDelta(text, self._message_index)] if text else []
