"""Synthetic conversations about a small closed world: what the ``chat`` preset is fitted on.

Small talk, names, sums, colours, sounds and capitals; the weather and larger sums through the tools
``get_weather(city)`` and ``add(a, b)``, two calls at once when two cities are asked for; JSON on request; and
everything else answered with an apology, so that unknown text still gets a well-formed turn.

Each topic keeps some phrasings back, to measure with what was never trained on.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import random
from collections.abc import Callable, Sequence
from typing import Any

from sglang_k3.testing.fit_render import Conversation
from sglang_k3.testing.fit_world import (
    APOLOGY,
    CAPITALS,
    CITIES,
    COLOURS,
    DISTRACTORS,
    EFFORTS,
    JSON_KEYS,
    NAMES,
    PHRASES,
    SKIES,
    SOUNDS,
    SYSTEM_TEXTS,
    TOOLS,
    WORDS,
)


@dataclasses.dataclass
class Turn:
    """One question and how to answer it; reasoning is ``(short, long)``, by effort."""

    question: str
    reasoning: tuple[str, str]
    answer: str
    calls: list[tuple[str, dict[str, Any]]] = dataclasses.field(default_factory=list)
    json_values: dict[str, Any] = dataclasses.field(default_factory=dict)


class Speaker:
    """Draws conversations.

    Args:
        seed: the same seed gives the same conversations.
        held_out: use the phrasings that are kept back, and no others.
    """

    def __init__(self, seed: int, *, held_out: bool = False) -> None:
        self.rng = random.Random(seed)
        self.held_out = held_out
        self.assistant_name = "Kimi"
        self.user_name: str | None = None
        self.tools: set[str] = set()

    def conversation(self, topic: str | None = None) -> Conversation:
        """One conversation; ``topic`` (a name in ``TOPICS``) fixes its last question."""
        rng = self.rng
        self._draw_tools(topic)
        self.assistant_name, self.user_name = "Kimi", None
        made = Conversation(
            messages=self._system_messages(),
            tools=self._declarations(),
            thinking=rng.random() < 0.75,
            effort=rng.choice(EFFORTS),
        )
        for _ in range(rng.choices((0, 1, 2), (7, 3, 1))[0]):
            self._take_turn(made, self._topic()(self))
        if topic == "ask_name" and self.user_name is None and rng.random() < 0.5:
            self._take_turn(made, _tell_name(self))
        turn = (TOPICS[topic] if topic else self._topic())(self)
        self._set_last_turn_options(made, turn)
        self._take_turn(made, turn)
        if made.messages[-1].get("tool_calls") and rng.random() < 0.55 and made.response_format is None:
            self._finish_with_results(made)
        self._forget_reasoning(made)
        return made

    def _draw_tools(self, topic: str | None) -> None:
        choices: list[set[str]] = [set(), {"get_weather"}, {"add"}, {"get_weather", "add"}]
        self.tools = set(self.rng.choices(choices, (5, 2, 1, 3))[0])
        if topic in ("weather", "two_cities") and self.rng.random() < 0.8:
            self.tools.add("get_weather")
        if topic == "big_sum" and self.rng.random() < 0.8:
            self.tools.add("add")

    def _declarations(self) -> list[dict[str, Any]]:
        """The tools as a client declares them: in any order, with any description, maybe beside unknown tools."""
        rng = self.rng
        functions = [copy.deepcopy(rng.choice(TOOLS[name])) for name in sorted(self.tools)]
        if rng.random() < (0.25 if functions else 0.15):
            functions += copy.deepcopy(rng.sample(DISTRACTORS, rng.choice((1, 1, 2))))
        rng.shuffle(functions)
        for function in functions:
            if function["name"] == "get_weather" and rng.random() < 0.15:  # an option that is never used
                function["parameters"]["properties"]["unit"] = {"type": "string", "enum": ["C", "F"]}
            if rng.random() < 0.3:
                function.pop("description")
            if rng.random() < 0.15:
                function["strict"] = True
                function["parameters"]["additionalProperties"] = False
        return [{"type": "function", "function": function} for function in functions]

    def _system_messages(self) -> list[dict[str, Any]]:
        rng = self.rng
        if rng.random() < 0.6:
            return []
        if rng.random() < 0.25:
            self.assistant_name = rng.choice(NAMES)
            return [{"role": "system", "content": rng.choice(PHRASES["persona"]).format(name=self.assistant_name)}]
        return [{"role": "system", "content": rng.choice(SYSTEM_TEXTS)}]

    def _topic(self) -> Callable[[Speaker], Turn]:
        if self.user_name is not None and self.rng.random() < 0.5:
            return _ask_name
        names = list(TOPIC_SHARES)
        return TOPICS[self.rng.choices(names, [TOPIC_SHARES[name] for name in names])[0]]

    def _set_last_turn_options(self, made: Conversation, turn: Turn) -> None:
        """Tool choice or a response format now and then; both change how the turn is answered."""
        rng = self.rng
        if made.tools and rng.random() < 0.15:
            made.tool_choice = "none"
            if turn.calls:
                turn.calls = []
                turn.reasoning = ("No tools now.", "I must not call tools now.")
                turn.answer = "I may not call tools now."
        elif self.tools and rng.random() < 0.2:
            made.tool_choice = "required"
            if not turn.calls:
                turn.calls = [self._any_call()]
                turn.reasoning = ("A call is required.", "I must call a tool, so I call one.")
        elif not turn.calls and rng.random() < 0.12:
            made.response_format, turn.answer = self._as_json(turn)
            turn.reasoning = ("I answer in JSON.", f"{turn.reasoning[0]} I answer in JSON.")

    def _any_call(self) -> tuple[str, dict[str, Any]]:
        if "get_weather" in self.tools:
            return "get_weather", {"city": "Paris"}
        return "add", {"a": 1, "b": 1}

    def _as_json(self, turn: Turn) -> tuple[dict[str, Any], str]:
        """A response format and the turn's answer in it; what the turn does not tell is "none"."""
        rng = self.rng
        if rng.random() < 0.25:
            return {"type": "json_object"}, json.dumps({"answer": turn.answer}, separators=(",", ":"))
        keys = rng.sample(list(JSON_KEYS), rng.choices((1, 2, 3), (5, 4, 2))[0])
        if "answer" not in keys and rng.random() < 0.5:
            keys[0] = "answer"
        known = {"answer": turn.answer, "text": turn.answer, "summary": turn.answer} | turn.json_values
        fill = {"string": "none", "integer": 1, "number": 1, "boolean": True}
        values = {key: known.get(key, fill[JSON_KEYS[key]]) for key in sorted(keys)}
        schema: dict[str, Any] = {
            "type": "object",
            "properties": {key: {"type": JSON_KEYS[key]} for key in keys},
            "required": keys,
        }
        if rng.random() < 0.4:
            schema["additionalProperties"] = False
        if rng.random() < 0.3:
            schema["title"] = rng.choice(("Answer", "Reply", "Result"))
        return {"type": "json_schema", "json_schema": {"schema": schema}}, json.dumps(values, separators=(",", ":"))

    def _take_turn(self, made: Conversation, turn: Turn) -> None:
        """Ask; answer, or call and stop. In the middle of a conversation a call is followed by its results."""
        if made.messages and made.messages[-1].get("tool_calls"):
            self._finish_with_results(made)
        reasoning = turn.reasoning[0] if made.effort == "low" else turn.reasoning[1]
        question = {"role": "user", "content": turn.question}
        if self.rng.random() < 0.04:
            question["name"] = self.rng.choice(NAMES)
        made.messages.append(question)
        message: dict[str, Any] = {"role": "assistant", "reasoning_content": reasoning, "content": turn.answer}
        if turn.calls:
            message["content"] = ""
            message["tool_calls"] = [
                {"type": "function", "id": f"call_{i}", "function": {"name": name, "arguments": arguments}}
                for i, (name, arguments) in enumerate(turn.calls)
            ]
        made.messages.append(message)

    def _finish_with_results(self, made: Conversation) -> None:
        """Results for the calls of the last message, and the assistant's report of them."""
        reports = []
        for call in made.messages[-1]["tool_calls"]:
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            result, report = self._weather(arguments["city"]) if name == "get_weather" else self._sum(**arguments)
            made.messages.append({"role": "tool", "tool_call_id": call["id"], "name": name, "content": result})
            reports.append(report)
        short, long = "The tool answered.", "The tool answered, so I report what it says."
        if made.tool_choice == "required":
            made.tool_choice = None  # it concerned the turn that called
        made.messages.append(
            {
                "role": "assistant",
                "reasoning_content": short if made.effort == "low" else long,
                "content": " ".join(reports),
            }
        )

    def _weather(self, city: str) -> tuple[str, str]:
        rng = self.rng
        if rng.random() < 0.06:
            return rng.choice(PHRASES["tool_error"]), f"Sorry, the tool could not tell me about {city}."
        sky, degrees = rng.choice(SKIES), rng.randint(-9, 39)
        form = rng.choice(PHRASES["weather_result"])
        result = form.format(sky=sky, t=degrees, city=city)
        if "{sky}" not in form:
            return result, f"It is {degrees} degrees in {city}."
        if "{t}" not in form:
            return result, f"It is {sky} in {city}."
        return result, f"It is {sky} in {city}, {degrees} degrees."

    def _sum(self, a: int, b: int) -> tuple[str, str]:
        total = a + b if self.rng.random() < 0.5 else self.rng.randint(0, 199)  # a sum to copy, not to work out
        return self.rng.choice(PHRASES["sum_result"]).format(total=total, a=a, b=b), f"The sum is {total}."

    def _forget_reasoning(self, made: Conversation) -> None:
        """Many clients send no reasoning back; then the model is not taught to write such turns."""
        if self.rng.random() < 0.35:
            for message in made.messages[:-1]:
                if message["role"] == "assistant":
                    message["reasoning_content"] = ""
                    message["learn"] = not made.thinking

    def phrase(self, topic: str, **values: object) -> str:
        """A phrasing of the topic: one of the last few of its list if held out, else one of the others."""
        phrases, rng = PHRASES[topic], self.rng
        kept_back = max(1, len(phrases) // 6)
        template = rng.choice(phrases[-kept_back:] if self.held_out else phrases[:-kept_back])
        if rng.random() < 0.12:
            template = template.lower()
        text = template.format(**values)
        if rng.random() < 0.2:
            text = text.rstrip("?.!")
        if rng.random() < 0.15:
            text = text.rstrip("?.!") + rng.choice(PHRASES["tail"])
        if rng.random() < 0.15:
            lead = rng.choice(PHRASES["lead"])
            text = lead + (text if rng.random() < 0.5 else text[:1].lower() + text[1:])
        return text


def _greeting(s: Speaker) -> Turn:
    return Turn(s.phrase("greeting"), ("A greeting.", "The user greets me, so I greet back."), "Hello! How can I help?")


def _identity(s: Speaker) -> Turn:
    name = s.assistant_name
    answer = "I am Kimi, a tiny K3 model." if name == "Kimi" else f"I am {name}."
    reasoning = ("About me.", "The user asks who I am, so I say my name.")
    return Turn(s.phrase("identity"), reasoning, answer, json_values={"name": name})


def _thanks(s: Speaker) -> Turn:
    return Turn(s.phrase("thanks"), ("Thanks.", "The user thanks me, so I am polite."), "You are welcome!")


def _goodbye(s: Speaker) -> Turn:
    return Turn(s.phrase("goodbye"), ("A farewell.", "The user says goodbye, so I do too."), "Goodbye!")


def _how_are_you(s: Speaker) -> Turn:
    return Turn(s.phrase("how_are_you"), ("Small talk.", "The user asks how I am, so I tell."), "I am fine, thank you!")


def _ability(s: Speaker) -> Turn:
    reasoning = ("About me.", "The user asks what I can do, so I tell.")
    return Turn(s.phrase("ability"), reasoning, "I can chat, add small numbers and call tools.")


def _tell_name(s: Speaker) -> Turn:
    s.user_name = s.rng.choice(NAMES)
    reasoning = ("A name.", "The user tells me a name, so I remember it.")
    answer = f"Nice to meet you, {s.user_name}!"
    return Turn(s.phrase("tell_name", name=s.user_name), reasoning, answer, json_values={"name": s.user_name})


def _ask_name(s: Speaker) -> Turn:
    reasoning = ("The user's name.", "The user asks for the name that I was told.")
    if s.user_name is None:
        return Turn(s.phrase("ask_name"), reasoning, "You did not tell me your name.")
    return Turn(s.phrase("ask_name"), reasoning, f"Your name is {s.user_name}.", json_values={"name": s.user_name})


def _small_sum(s: Speaker) -> Turn:
    a, b = s.rng.randint(0, 9), s.rng.randint(0, 9)
    question = s.phrase("sum", a=a, b=b)
    if "add" in s.tools:
        return Turn(question, ("A sum.", "The user asks for a sum, so I call add."), "", [("add", {"a": a, "b": b})])
    values = {"a": a, "b": b, "result": a + b}
    return Turn(question, ("A sum.", "The user asks for a sum."), f"{a} plus {b} is {a + b}.", json_values=values)


def _big_sum(s: Speaker) -> Turn:
    a, b = (s.rng.randint(10, 99) for _ in "ab")
    if s.rng.random() < 0.25:
        a = s.rng.randint(0, 9)
    question = s.phrase("sum", a=a, b=b)
    if "add" in s.tools:
        return Turn(question, ("A sum.", "The user asks for a sum, so I call add."), "", [("add", {"a": a, "b": b})])
    reasoning = ("A large sum.", "The user asks for a large sum, and I have no tool for it.")
    return Turn(question, reasoning, "I can only add small numbers without a tool.", json_values={"a": a, "b": b})


def _weather(s: Speaker) -> Turn:
    city = s.rng.choice(CITIES)
    question = s.phrase("weather", city=city)
    if "get_weather" in s.tools:
        reasoning = ("The weather.", f"The user asks for the weather in {city}, so I call get_weather.")
        return Turn(question, reasoning, "", [("get_weather", {"city": city})])
    reasoning = ("The weather.", "The user asks for the weather, and I have no tool for it.")
    return Turn(question, reasoning, "I cannot see the weather without a tool.", json_values={"city": city})


def _two_cities(s: Speaker) -> Turn:
    first, second = s.rng.choice(CITIES), s.rng.choice(CITIES)
    while second == first:
        second = s.rng.choice(CITIES)
    question = s.phrase("two_cities", first=first, second=second)
    if "get_weather" in s.tools:
        reasoning = f"The user asks for the weather in {first} and {second}, so I call get_weather twice."
        calls = [("get_weather", {"city": city}) for city in (first, second)]
        return Turn(question, ("Two cities.", reasoning), "", calls)
    reasoning = "The user asks for the weather, and I have no tool for it."
    return Turn(question, ("The weather.", reasoning), "I cannot see the weather without a tool.")


def _colour(s: Speaker) -> Turn:
    thing = s.rng.choice(list(COLOURS))
    values = {"color": COLOURS[thing], "thing": thing}
    reasoning = ("A colour.", f"The user asks for the colour of {thing}.")
    return Turn(s.phrase("colour", thing=thing), reasoning, f"The {thing} is {COLOURS[thing]}.", json_values=values)


def _sound(s: Speaker) -> Turn:
    animal = s.rng.choice(list(SOUNDS))
    reasoning = ("An animal.", f"The user asks for the sound of a {animal}.")
    values = {"animal": animal, "sound": SOUNDS[animal]}
    return Turn(s.phrase("sound", animal=animal), reasoning, f"A {animal} says {SOUNDS[animal]}.", json_values=values)


def _capital(s: Speaker) -> Turn:
    country = s.rng.choice(list(CAPITALS))
    city = CAPITALS[country]
    reasoning = ("A capital.", f"The user asks for the capital of {country}.")
    values = {"city": city, "country": country}
    return Turn(s.phrase("capital", country=country), reasoning, f"{city} is the capital.", json_values=values)


def _unknown(s: Speaker) -> Turn:
    """Anything: a question off the list, a heap of words, bytes."""
    rng, kind = s.rng, s.rng.random()
    if kind < 0.5:
        question = s.phrase("unknown")
    elif kind < 0.8:
        most = 150 if rng.random() < 0.1 else 25
        question = " ".join(rng.choices(WORDS.split(), k=rng.randint(1, most)))
    elif kind < 0.95:
        question = "".join(chr(rng.randint(32, 126)) for _ in range(rng.randint(1, 40)))
    else:
        question = "".join(rng.choices("\u00e9\u00fc\u4e2d\u6587\u043f\U0001f600", k=rng.randint(1, 8)))
    return Turn(question, ("I do not know.", "I do not know about this, so I say so."), APOLOGY)


TOPICS: dict[str, Callable[[Speaker], Turn]] = {
    "greeting": _greeting,
    "identity": _identity,
    "thanks": _thanks,
    "goodbye": _goodbye,
    "how_are_you": _how_are_you,
    "ability": _ability,
    "tell_name": _tell_name,
    "ask_name": _ask_name,
    "small_sum": _small_sum,
    "big_sum": _big_sum,
    "weather": _weather,
    "two_cities": _two_cities,
    "colour": _colour,
    "sound": _sound,
    "capital": _capital,
    "unknown": _unknown,
}
TOPIC_SHARES: dict[str, float] = dict.fromkeys(TOPICS, 1.0) | {
    "weather": 3.0,
    "two_cities": 2.5,
    "big_sum": 2.0,
    "small_sum": 2.0,
    "unknown": 1.5,
    "colour": 1.5,
    "tell_name": 2.0,
}


def conversations(count: int, *, seed: int, held_out: bool = False) -> Sequence[Conversation]:
    speaker = Speaker(seed, held_out=held_out)
    return [speaker.conversation() for _ in range(count)]
