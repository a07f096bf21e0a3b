"""Tool use: one call, two calls in one turn, a tool that fails, and a question that no offered tool answers.

Calls go to the commentary channel with recipient functions.NAME and JSON arguments; results come back as tool
messages; the final answer repeats the result. Called by `mixture`.
"""

import json
import random
from dataclasses import replace

from tools.tiny_gpt_oss.sample import Key, Sample, Split, ToolSpec, Turn, analysis, draw, final, pick_effort, user
from tools.tiny_gpt_oss.tool_catalog import CATALOG, Call, Tool

ERRORS = ("not found", "no connection", "try again later")


def make_tool_use(rng: random.Random, split: Split) -> Sample:
    key, (tool, spec, call) = draw(rng, split, lambda r: _draw_call(r, r.choice(CATALOG)))
    effort = pick_effort(rng)
    turns = [user(_polite(rng, call.question)), *_call_turns(spec, call, effort)]
    if split == "train" and rng.random() < 0.08:
        error = rng.choice(ERRORS)
        turns[-1] = _result_turn(spec, {"error": error})
        turns += _final_turns(f"The tool reported an error: {error}.", (error,), effort)
    else:
        turns += _final_turns(call.answer, call.answer_values, effort)
    return Sample("tool", key, effort, tuple(turns), _offer(rng, [(tool, spec)]))


def make_two_tools(rng: random.Random, split: Split) -> Sample:
    """Two questions in one user turn, answered by two calls one after the other."""
    first_tool, second_tool = rng.sample(CATALOG, 2)
    key, (_, first_spec, first) = draw(rng, split, lambda r: _draw_call(r, first_tool))
    _, (_, second_spec, second) = draw(rng, split, lambda r: _draw_call(r, second_tool))
    effort = pick_effort(rng)
    joint = rng.choice(("Also:", "And then:", "Second:"))
    turns = [user(f"{first.question} {joint} {second.question}")]
    turns += _call_turns(first_spec, first, effort)
    turns += _call_turns(second_spec, second, effort)
    turns += _final_turns(f"{first.answer} {second.answer}", (*first.answer_values, *second.answer_values), effort)
    offered = _offer(rng, [(first_tool, first_spec), (second_tool, second_spec)])
    return Sample("two_tools", key, effort, tuple(turns), offered)


def make_tool_session(rng: random.Random, split: Split) -> Sample:
    """A second user turn with a tool call; the first exchange is history, without its analysis."""
    first_tool, second_tool = rng.sample(CATALOG, 2)
    _, (_, first_spec, first) = draw(rng, "train", lambda r: _draw_call(r, first_tool))
    key, (_, second_spec, second) = draw(rng, split, lambda r: _draw_call(r, second_tool))
    effort = pick_effort(rng)
    history = [user(first.question), *_call_turns(first_spec, first, "low"), final(first.answer)]
    turns = [replace(turn, is_trained=effort == "low") for turn in history]
    turns += [user(second.question), *_call_turns(second_spec, second, effort)]
    turns += _final_turns(second.answer, second.answer_values, effort)
    offered = _offer(rng, [(first_tool, first_spec), (second_tool, second_spec)])
    return Sample("tool_session", key, effort, tuple(turns), offered)


def make_no_tool(rng: random.Random, split: Split) -> Sample:
    """A tool question although no tool fits: the answer says so, with no call."""
    tool = rng.choice(CATALOG)
    key, (_, _, call) = draw(rng, split, lambda r: _draw_call(r, tool))
    effort = pick_effort(rng)
    thought = () if effort == "low" else (analysis("I have no tool for this. I will say so."),)
    answer = final("I have no tool for that.", ("no tool",))
    offered = offer_unrelated(rng, exclude=tool) if rng.random() < 0.6 else ()
    return Sample("no_tool", key, effort, (user(_polite(rng, call.question)), *thought, answer), offered)


def offer_unrelated(rng: random.Random, exclude: Tool | None = None) -> tuple[ToolSpec, ...]:
    others = [tool for tool in CATALOG if tool is not exclude]
    return tuple(tool.instantiate(rng)[0] for tool in rng.sample(others, rng.randint(1, 3)))


def _draw_call(rng: random.Random, tool: Tool) -> tuple[Key, tuple[Tool, ToolSpec, Call]]:
    spec, naming = tool.instantiate(rng)
    call = tool.call(rng, naming)
    return ("tool", tool.kind, *map(str, call.arguments.values())), (tool, spec, call)


def _offer(rng: random.Random, needed: list[tuple[Tool, ToolSpec]]) -> tuple[ToolSpec, ...]:
    kinds = [tool for tool, _ in needed]
    others = [tool for tool in CATALOG if tool not in kinds]
    extra = [tool.instantiate(rng)[0] for tool in rng.sample(others, rng.randint(0, 3))]
    offered = [spec for _, spec in needed] + extra
    rng.shuffle(offered)
    return tuple(offered)


def _polite(rng: random.Random, question: str) -> str:
    return rng.choice(("", "", "", "Hello! ", "Please help me. ", "Hi. ")) + question


def _call_turns(spec: ToolSpec, call: Call, effort: str) -> list[Turn]:
    turns = []
    if effort == "medium":
        turns.append(analysis(f"I will use {spec.name}."))
    elif effort == "high":
        given = ", ".join(f"{name} = {value}" for name, value in call.arguments.items())
        turns.append(analysis(f"The tool functions.{spec.name} can answer this. Arguments: {given}. I will call it now."))
    arguments = json.dumps(call.arguments, separators=(",", ":"))
    turns.append(Turn("assistant", arguments, channel="commentary", recipient=f"functions.{spec.name}"))
    turns.append(_result_turn(spec, call.result))
    return turns


def _result_turn(spec: ToolSpec, result: dict) -> Turn:
    text = json.dumps(result, separators=(",", ":"))
    return Turn("tool", text, channel="commentary", recipient="assistant", author=f"functions.{spec.name}")


def _final_turns(answer: str, values: tuple[str, ...], effort: str) -> list[Turn]:
    thought = [analysis("The tool answered. I will give the result to the user.")] if effort == "high" else []
    return [*thought, final(answer, values)]
