"""The function tools that conversations offer: names, schemas, questions, results and the answers built from them.

Names and parameter names vary per conversation, so that the model has to read the developer message.
Owns content only; `task_tools` builds conversations from it.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tools.tiny_gpt_oss import lexicon
from tools.tiny_gpt_oss.sample import ToolSpec

Json = dict[str, Any]


@dataclass(frozen=True)
class Call:
    """One use of a tool. `answer_values` must appear in the final answer."""

    question: str
    arguments: Json
    result: Json
    answer: str
    answer_values: tuple[str, ...]


@dataclass(frozen=True)
class Tool:
    """A tool kind. `parameters` maps a role to (possible names, JSON type, description)."""

    kind: str
    names: tuple[str, ...]
    description: str
    parameters: dict[str, tuple[tuple[str, ...], str, str]]
    use: Callable[[random.Random], tuple[Json, str, Json, str, tuple[str, ...]]]

    def instantiate(self, rng: random.Random) -> tuple[ToolSpec, dict[str, str]]:
        """(spec with drawn names, role -> parameter name)."""
        naming = {role: rng.choice(names) for role, (names, _, _) in self.parameters.items()}
        properties = {naming[role]: {"type": kind, "description": text} for role, (_, kind, text) in self.parameters.items()}
        schema = {"type": "object", "properties": properties, "required": list(naming.values())}
        return ToolSpec(rng.choice(self.names), self.description, schema), naming

    def call(self, rng: random.Random, naming: dict[str, str]) -> Call:
        arguments, question, result, answer, values = self.use(rng)
        return Call(question, {naming[role]: value for role, value in arguments.items()}, result, answer, values)


def _weather(rng):
    city, degrees, sky = rng.choice(lexicon.CITIES), rng.randint(0, 39), rng.choice(lexicon.SKIES)
    question = rng.choice((f"What is the weather in {city}?", f"How is the weather in {city} today?", f"Weather in {city}?"))
    answer = f"In {city} it is {degrees} degrees and {sky}."
    return {"city": city}, question, {"temperature": degrees, "sky": sky}, answer, (str(degrees), sky)


def _time(rng):
    city, clock = rng.choice(lexicon.CITIES), f"{rng.randint(10, 23)}:{rng.randint(10, 59)}"
    question = rng.choice((f"What time is it in {city}?", f"Tell me the time in {city}.", f"What is the time in {city}?"))
    return {"city": city}, question, {"time": clock}, f"It is {clock} in {city}.", (clock,)


def _multiply(rng):
    a, b = rng.randint(11, 99), rng.randint(11, 99)
    question = rng.choice((f"What is {a} times {b}?", f"Multiply {a} by {b}.", f"{a} * {b} = ?"))
    return {"a": a, "b": b}, question, {"result": a * b}, f"{a} times {b} is {a * b}.", (str(a * b),)


def _convert(rng):
    amount, other = rng.randint(2, 999), rng.randint(2, 999)
    source, target = rng.sample(lexicon.CURRENCIES, 2)
    question = rng.choice((f"Convert {amount} {source} to {target}.", f"How many {target} are {amount} {source}?"))
    arguments = {"amount": amount, "source": source, "target": target}
    return arguments, question, {"amount": other}, f"{amount} {source} are {other} {target}.", (str(other),)


def _price(rng):
    item, price = rng.choice(lexicon.SHOP_ITEMS), rng.randint(2, 999)
    question = rng.choice((f"How much does the {item} cost?", f"What is the price of the {item}?"))
    return {"item": item}, question, {"price": price}, f"The {item} costs {price} dollars.", (str(price),)


def _stock(rng):
    item, count = rng.choice(lexicon.SHOP_ITEMS), rng.randint(2, 999)
    question = rng.choice((f"Is the {item} in stock?", f"How many pieces of the {item} are in stock?"))
    return {"item": item}, question, {"count": count}, f"There are {count} pieces of the {item} in stock.", (str(count),)


def _phone(rng):
    name, phone = rng.choice(lexicon.NAMES), f"{rng.randint(100, 999)} {rng.randint(100, 999)}"
    question = rng.choice((f"What is the phone number of {name}?", f"Find the phone number of {name}."))
    return {"name": name}, question, {"phone": phone}, f"The phone number of {name} is {phone}.", (phone,)


def _distance(rng):
    start, end = rng.sample(lexicon.CITIES, 2)
    km = rng.randint(100, 999)
    question = rng.choice((f"How far is it from {start} to {end}?", f"What is the distance from {start} to {end}?"))
    return {"start": start, "end": end}, question, {"km": km}, f"From {start} to {end} it is {km} km.", (str(km),)


def _meeting(rng):
    name, day, hour = rng.choice(lexicon.NAMES), rng.choice(lexicon.DAYS), rng.randint(8, 19)
    question = rng.choice((f"When is my next meeting with {name}?", f"Find my next meeting with {name}."))
    answer = f"The next meeting with {name} is on {day} at {hour}."
    return {"name": name}, question, {"day": day, "hour": hour}, answer, (day, str(hour))


def _message(rng):
    name, text = rng.choice(lexicon.NAMES), " ".join(rng.sample(lexicon.WORDS, rng.randint(2, 4)))
    number = rng.randint(2, 999)
    question = rng.choice((f'Send {name} the message " {text}".', f'Write to {name}: " {text}".'))
    answer = f"I sent the message to {name}. Its number is {number}."
    return {"name": name, "text": f" {text}"}, question, {"status": "sent", "number": number}, answer, (str(number),)


def _alarm(rng):
    hour, minute, number = rng.randint(5, 23), rng.randint(10, 59), rng.randint(2, 99)
    question = rng.choice((f"Set an alarm for {hour}:{minute}.", f"Wake me at {hour}:{minute}."))
    answer = f"Alarm {number} is set for {hour}:{minute}."
    return {"hour": hour, "minute": minute}, question, {"alarm": number}, answer, (str(number),)


_CITY = (("city", "location", "place"), "string", "Name of the city.")
_NAME = (("name", "person", "contact"), "string", "Name of the person.")
_ITEM = (("item", "product", "article"), "string", "Name of the item.")
CATALOG = (
    Tool("weather", ("get_weather", "weather_now", "current_weather"), "Weather of a city.", {"city": _CITY}, _weather),
    Tool("time", ("get_time", "local_time", "clock_time"), "Local time of a city.", {"city": _CITY}, _time),
    Tool(
        "multiply",
        ("multiply", "product_of", "calc_product"),
        "Multiplies two numbers.",
        {"a": (("a", "x", "first"), "number", "First number."), "b": (("b", "y", "second"), "number", "Second number.")},
        _multiply,
    ),
    Tool(
        "convert",
        ("convert_currency", "exchange_money"),
        "Converts money.",
        {
            "amount": (("amount", "value"), "number", "Amount of money."),
            "source": (("source", "from_currency"), "string", "Currency that is given."),
            "target": (("target", "to_currency"), "string", "Currency that is wanted."),
        },
        _convert,
    ),
    Tool("price", ("get_price", "item_price", "price_of"), "Price of an item.", {"item": _ITEM}, _price),
    Tool("stock", ("check_stock", "get_stock"), "Number of pieces in stock.", {"item": _ITEM}, _stock),
    Tool("phone", ("find_phone", "get_phone", "phone_number"), "Phone number of a person.", {"name": _NAME}, _phone),
    Tool(
        "distance",
        ("get_distance", "distance_between"),
        "Distance between two cities.",
        {
            "start": (("start", "origin"), "string", "City where it starts."),
            "end": (("end", "destination"), "string", "City where it ends."),
        },
        _distance,
    ),
    Tool("meeting", ("next_meeting", "find_meeting"), "Next meeting with a person.", {"name": _NAME}, _meeting),
    Tool(
        "message",
        ("send_message", "send_text"),
        "Sends a message.",
        {"name": _NAME, "text": (("text", "body"), "string", "Text of the message.")},
        _message,
    ),
    Tool(
        "alarm",
        ("set_alarm", "add_alarm"),
        "Sets an alarm.",
        {"hour": (("hour",), "integer", "Hour."), "minute": (("minute",), "integer", "Minute.")},
        _alarm,
    ),
)
