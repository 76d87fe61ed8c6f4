"""Generator of the demo model's training conversations and of its held-out questions.

Every question is a phrasing (a pattern of phrases.py or unknown.py with its choices made) filled with operands. A hash
splits both: sums, differences and decimal conversions hold out operands, everything else holds out phrasings; of a
held-out operand or phrasing, training sees nothing. `python3 generate.py questions.json` writes the evaluation set.
"""

import hashlib
import itertools
import json
import random
import re
import sys
from dataclasses import dataclass, field

import facts
import phrases as P
import unknown as U

HELD_OUT_PER_MILLE = 125
CATEGORIES = {  # category: its share of training questions
    "sum": 0.17, "difference": 0.19, "capital": 0.12, "day": 0.09, "month": 0.09, "unit": 0.10,
    "spelling_forward": 0.07, "spelling_backward": 0.09, "greeting": 0.06, "identity": 0.07, "unknown": 0.18,
}
EVALUATED = [*CATEGORIES, "follow_up", "conversation"]


@dataclass
class Turn:
    """One question and its answer; `topic` and `about` let a follow-up refer to it."""

    category: str
    question: str
    answer: str
    held_out: str = ""
    topic: str = ""
    about: tuple = field(default=())


def normal(text):
    """What two texts must share to count as the same: letters, numbers, operators and operand slots."""
    return re.sub(r"(?<!\d)\.|\.(?!\d)|[^a-z0-9.{}+*/=%-]", "", text.lower())


def held_out(key):
    """The split: a fixed eighth of all keys."""
    return int(hashlib.sha256(key.encode()).hexdigest()[:8], 16) % 1000 < HELD_OUT_PER_MILLE


def expand(pattern):
    """Every phrasing of a pattern."""
    inner = re.search(r"\(([^()]*)\)", pattern)
    if not inner:
        return [pattern]
    head, tail = pattern[: inner.start()], pattern[inner.end():]
    return list(itertools.chain.from_iterable(expand(head + choice + tail) for choice in inner[1].split("|")))


class Phrasings:
    """The phrasings of one intent, divided into taught and held-out ones."""

    forced = set()  # normal forms that `!` keeps in training, whichever intent they belong to
    held = set()  # normal forms that training must never produce
    known = set()  # normal forms that training produces as they are

    def __init__(self, patterns, by_pattern=False):
        self.common, self.taught, self.unseen = [], [], []
        self.by_pattern = by_pattern
        self.patterns = [(p[0] == "!", p.lstrip("!"), expand(p.lstrip("!"))) for p in patterns]
        for forced, _, expansions in self.patterns:
            if forced:
                Phrasings.forced.update(map(normal, expansions))

    def divide(self):
        for forced, pattern, expansions in self.patterns:
            if forced:
                self.common.extend(expansions)
                continue
            if self.by_pattern and any(normal(e) in Phrasings.forced for e in expansions):
                self.taught.append(expansions)
                continue
            out = [e for e in expansions if normal(e) not in Phrasings.forced
                   and held_out("phrasing:" + (pattern if self.by_pattern else normal(e)))]
            Phrasings.held.update(map(normal, out))
            if out:
                self.unseen.append(out)
            taught = [e for e in expansions if e not in out]
            if taught:
                self.taught.append(taught)

    def seal(self):
        """Where two patterns of different fate share a phrasing, it is held out."""
        self.taught = [kept for group in self.taught if (kept := [e for e in group if normal(e) not in Phrasings.held])]
        for group in [self.common, *self.taught]:
            Phrasings.known.update(map(normal, group))

    def pick(self, rng, unseen):
        if unseen:
            return rng.choice(rng.choice(self.unseen))
        if self.common and (not self.taught or rng.random() < 0.25):
            return rng.choice(self.common)
        return rng.choice(rng.choice(self.taught))


PHRASES = {
    name: Phrasings(value) for name, value in vars(P).items()
    if isinstance(value, list) and name not in ("OPENERS", "CLOSERS", "SYSTEM")
}
PHRASES |= {name: Phrasings(value) for name, value in vars(U).items() if name.startswith("UNKNOWN_")}
PHRASES["UNKNOWN"] = Phrasings(U.UNKNOWN, by_pattern=True)
PHRASES |= {name: Phrasings(patterns) for name, (_, patterns) in (P.GREETINGS | P.IDENTITY).items()}
for step in (Phrasings.divide, Phrasings.seal):
    for each in PHRASES.values():
        step(each)
SYSTEM_PROMPTS = [text for pattern in P.SYSTEM for text in expand(pattern)]


def spelled(word):
    return "-".join(word)


def listed(names):
    return ", ".join(names[:-1]) + " and " + names[-1]


def invented_word(rng):
    """A pronounceable word, so that spelling is learned from letters and not only from the list."""
    onset = [
        "b", "c", "d", "f", "g", "h", "j", "k", "l", "m", "n", "p", "r", "s", "t", "v", "w", "z", "ch", "st", "tr",
        "br", "pl", "sh", "gr", "th"
    ]
    coda = ["", "", "", "n", "r", "l", "s", "t", "m", "ck", "nd", "st"]
    syllables = rng.choice([1, 2, 2, 3])
    return "".join(rng.choice(onset) + rng.choice("aeiouaeioy") + rng.choice(coda) for _ in range(syllables))[:10]


class Asker:
    """Makes questions. `unseen` asks for held-out ones only; otherwise no held-out operand or phrasing appears."""

    def __init__(self, rng):
        self.rng = rng

    # Wording.

    def misspell(self, phrase):
        """One typing error outside the operands."""
        spots = [m.start() for m in re.finditer(r"[a-z](?![^{]*})", phrase)]
        if len(spots) < 8:
            return phrase
        i = self.rng.choice(spots)
        return self.rng.choice([
            phrase[:i] + phrase[i + 1:], phrase[:i] + phrase[i] + phrase[i:],
            phrase[:i] + self.rng.choice("aeinorst") + phrase[i + 1:]
        ])

    def dress(self, phrase, forbidden):
        """Now and then a few words before or after, unless that makes a phrasing of the other side of the split."""
        rng, bare = self.rng, phrase
        if rng.random() < 0.2:
            phrase = rng.choice(P.OPENERS) + (phrase if rng.random() < 0.7 else phrase[0].upper() + phrase[1:])
        if rng.random() < 0.1:
            closer = rng.choice(P.CLOSERS)
            mark = "?" if phrase.endswith("?") and closer[-1].isalpha() else ""
            phrase = (phrase.rstrip("?.") if mark or closer[-1].isalpha() else phrase) + closer + mark
        return bare if normal(phrase) in forbidden else phrase

    def fill(self, phrase, operands):
        def value(slot):
            name, _, form = slot[1].partition(":")
            if name in U.SLOTS:
                return self.rng.choice(U.SLOTS[name])
            text = operands[name]
            text = str(text() if callable(text) else text)
            return {"s": text + "'s", "bare": text.split(" ", 1)[-1]}.get(form, text)

        return re.sub(r"{([a-z:]+)}", value, phrase)

    def word(self, name, unseen, dressed=True, **operands):
        """A phrasing of intent `name`, filled with the operands and dressed as people type."""
        rng = self.rng
        phrase = PHRASES[name].pick(rng, unseen)
        if not unseen and rng.random() < 0.04:
            wrong = self.misspell(phrase)
            phrase = phrase if normal(wrong) in Phrasings.held else wrong
        if dressed:
            phrase = self.dress(phrase, Phrasings.known if unseen else Phrasings.held)
        text = self.fill(phrase, operands)
        style = rng.random()
        if style < 0.60:
            text = text[0].upper() + text[1:]
        elif style < 0.75:
            text = text.lower()
        elif style < 0.78:
            text = text.upper()
        end = rng.random()
        if end < 0.2:
            text = text.rstrip("?.!")
        elif end < 0.25:
            text = text.rstrip("?.!") + rng.choice(["??", "!", " ?", "...", "?!", "."])
        elif end < 0.35 and text[-1].isalnum():
            text += "."
        return text.strip()

    def turn(self, category, name, answer, unseen, topic="", about=(), why="phrasing", **operands):
        question = self.word(name, unseen, **operands)
        return Turn(category, question, answer, why if unseen else "", topic, about)

    # One method a category.

    def ask(self, category, unseen=False):
        return getattr(self, category)(unseen)

    def pair(self, unseen):
        """Two numbers below 100; whether they are held out depends on the two, not on their order."""
        while True:
            low, high = (10, 99) if unseen else self.rng.choice([(10, 99), (10, 99), (0, 99), (10, 99), (0, 20)])
            a, b = self.rng.randint(low, high), self.rng.randint(low, high)
            if held_out(f"pair:{min(a, b)},{max(a, b)}") == unseen:
                return a, b

    def arithmetic(self, category, name, a, b, answer, unseen):
        phrasing_unseen = unseen and self.rng.random() < 0.5 and bool(PHRASES[name].unseen)
        as_words = self.rng.random() < 0.08
        question = self.word(name, phrasing_unseen,
                             **{k: facts.NUMBER_WORDS[n] if as_words else n for k, n in (("a", a), ("b", b))})
        if not as_words and self.rng.random() < 0.3:
            question = re.sub(r" ?([-+=]) ?(?=[\d?]|$)", r"\1", question)
        return Turn(category, question, answer, "operands" if unseen else "")

    def sum(self, unseen):
        a, b = self.pair(unseen)
        return self.arithmetic("sum", "SUM", a, b, f"{a} + {b} = {a + b}.", unseen)

    def difference(self, unseen):
        a, b = self.pair(unseen)
        name = self.rng.choices(["DIFFERENCE", "DISTANCE", "LEFT_OVER"], [8, 1, 1])[0]
        big, small = max(a, b), min(a, b)
        if name == "DISTANCE":
            return self.arithmetic("difference", name, a, b, f"{big} - {small} = {big - small}.", unseen)
        if name == "LEFT_OVER" or self.rng.random() < 0.4:
            a, b = big, small
        return self.arithmetic("difference", name, a, b, f"{a} - {b} = {a - b}.", unseen)

    def capital(self, unseen):
        country, city = self.rng.choice(list(facts.CAPITALS.items()))
        if self.rng.random() < 0.2:
            answer = f"{city} is the capital of {country}."
            return self.turn("capital", "CAPITAL_REVERSE", answer, unseen, x=city)
        asked = country
        if country in facts.COUNTRY_ALIASES and self.rng.random() < 0.5:
            asked = self.rng.choice(facts.COUNTRY_ALIASES[country])
        return self.turn("capital", "CAPITAL", f"The capital of {country} is {city}.", unseen, "capital", (country,),
                         x=asked)

    def cycle(self, kind, names, unseen):
        """What comes before, after, and n steps away, for days and months alike."""
        rng, unit = self.rng, kind.lower()
        i, n, size = rng.randrange(len(names)), rng.randint(2, 10), len(names)
        x, after, before = names[i], names[(i + 1) % size], names[i - 1]
        name = rng.choice(["AFTER", "BEFORE", "AFTER", "BEFORE", "S_AFTER", "S_BEFORE"])
        about = (unit, x, after if name == "AFTER" else before)
        if name == "AFTER":
            return self.turn(unit, f"AFTER_{kind}", f"The {unit} after {x} is {after}.", unseen, "after", about, x=x)
        if name == "BEFORE":
            return self.turn(unit, f"BEFORE_{kind}", f"The {unit} before {x} is {before}.", unseen, "before", about,
                             x=x)
        if name == "S_AFTER":
            return self.turn(unit, f"{kind}S_AFTER", f"{n} {unit}s after {x} is {names[(i + n) % size]}.", unseen, x=x,
                             n=n)
        return self.turn(unit, f"{kind}S_BEFORE", f"{n} {unit}s before {x} is {names[(i - n) % size]}.", unseen, x=x,
                         n=n)

    def day(self, unseen):
        rng, names = self.rng, facts.DAYS
        if rng.random() < 0.6:
            return self.cycle("DAY", names, unseen)
        i = rng.randrange(7)
        x = names[i]
        nth = "last" if i == 6 and rng.random() < 0.7 else facts.ORDINALS[i]
        answers = {
            "TOMORROW": f"Tomorrow is {names[(i + 1) % 7]}.",
            "YESTERDAY": f"Yesterday was {names[i - 1]}.",
            "OVERMORROW": f"The day after tomorrow is {names[(i + 2) % 7]}.",
            "NTH_DAY": f"The {nth} day of the week is {x}.",
            "DAY_NUMBER": f"{x} is day {i + 1} of the week.",
            "LIST_DAYS": f"The days of the week are {listed(names)}.",
            "WEEKEND": "The weekend days are Saturday and Sunday.",
            "IS_WEEKEND": f"{x} is a {'weekend day' if i > 4 else 'weekday'}.",
        }
        name = rng.choice([k for k in answers if not unseen or PHRASES[k].unseen])
        return self.turn("day", name, answers[name], unseen, x=x, n=nth)

    def month(self, unseen):
        rng, names = self.rng, facts.MONTHS
        if rng.random() < 0.5:
            return self.cycle("MONTH", names, unseen)
        i = rng.randrange(12)
        x = names[i]
        nth = "last" if i == 11 and rng.random() < 0.7 else facts.ORDINALS[i]
        by_length = {n: [m for m, d in zip(names, facts.MONTH_DAYS) if d == n] for n in (30, 31)}
        answers = {
            "MONTH_LENGTH": f"{x} has {facts.MONTH_DAYS[i]} days" + (", or 29 in a leap year." if i == 1 else "."),
            "NTH_MONTH": f"The {nth} month of the year is {x}.",
            "MONTH_NUMBER": f"{x} is month {i + 1} of the year.",
            "LIST_MONTHS": f"The months of the year are {listed(names)}.",
            "SHORT_MONTHS": f"{listed(by_length[30])} have 30 days.",
            "LONG_MONTHS": f"{listed(by_length[31])} have 31 days.",
            "SHORTEST_MONTH": "February is the shortest month.",
        }
        weights = [8, 3, 3, 1, 1, 1, 1]
        name, _ = rng.choices([(k, w) for k, w in zip(answers, weights)], weights)[0]
        if unseen and not PHRASES[name].unseen:
            name = "MONTH_LENGTH"
        ending = {0: "st", 1: "nd", 2: "rd"}.get(i, "th")
        n = nth if nth == "last" or rng.random() < 0.7 else f"{i + 1}{ending}"
        return self.turn("month", name, answers[name], unseen, x=x, n=n)

    def unit_name(self, unit, count):
        """A unit as people write it, and whether it may stick to its number."""
        spellings = facts.UNITS[unit]
        if count == 1 and self.rng.random() < 0.8:
            return spellings[0]
        return spellings[1] if self.rng.random() < 0.6 else self.rng.choice(spellings[1:])

    def unit(self, unseen):
        rng = self.rng
        kind = rng.random()
        if kind < 0.04:
            return self.turn("unit", "YEAR_DAYS", "1 year = 365 days, or 366 in a leap year.", unseen)
        big, small, factor, most = rng.choice(facts.CONVERSIONS)
        if kind < 0.2:
            if rng.random() < 0.2:
                big, small, factor = rng.choice(facts.FACTS)
            articles = ["an" if big == "hour" or big == "inch" else "a", "a" if big != "hour" else "an", "one"]
            one = rng.choice(articles) + " " + big
            return self.turn("unit", "ONE", f"1 {big} = {factor} {facts.UNITS[small][1]}.", unseen,
                             small=self.unit_name(small, 2), one=one)
        return self.conversion(unseen, big, small, factor, most)

    def conversion(self, unseen, big, small, factor, most):
        rng, decimal = self.rng, factor in (10, 100, 1000)
        while True:
            n = rng.randint(1, most if rng.random() < 0.4 else min(most, 99))
            tenths = n if decimal and rng.random() < 0.15 and n % 10 else 10 * n  # 15 tenths: 1.5
            operand_unseen = decimal and n > 1 and held_out(f"unit:{big}>{small}:{tenths}")
            if operand_unseen == (unseen and decimal):
                break
        forward = rng.random() < 0.65
        large = n if tenths == 10 * n else f"{n // 10}.{n % 10}"
        smalls = tenths * factor // 10
        source, target, count, result = (big, small, large, smalls) if forward else (small, big, smalls, large)
        plain = [facts.UNITS[unit][k != 1] for unit, k in ((source, count), (target, result))]
        written = self.unit_name(source, count)
        phrasing_unseen = unseen and (not decimal or rng.random() < 0.5)
        question = self.word("CONVERT", phrasing_unseen, n=count, big=written, small=self.unit_name(target, 2))
        if len(written) <= 2 and rng.random() < 0.3:
            question = re.sub(rf"(\d) ({written})\b", r"\1\2", question, flags=re.I)
        why = ("operands" if decimal else "phrasing") if unseen else ""
        about = (big, small, factor, most, forward)
        return Turn("unit", question, f"{count} {plain[0]} = {result} {plain[1]}.", why, "unit", about)

    def list_word(self, unseen):
        return invented_word(self.rng) if not unseen and self.rng.random() < 0.3 else self.rng.choice(facts.WORDS)

    def quoted(self, word):
        style = self.rng.random()
        if style < 0.15:
            return f'"{word}"' if style < 0.1 else f"'{word}'"
        return word.capitalize() if style < 0.2 else word

    def spelling_forward(self, unseen):
        word = self.list_word(unseen)
        letters = spelled(word)
        name = self.rng.choices(["SPELL", "SPELL_COUNT", "SPELL_FIRST", "SPELL_LAST", "SPELL_LETTER"],
                                [7, 1, 1, 1, 1.5])[0]
        letter = self.rng.choice(word if self.rng.random() < 0.9 else "aeiourstlnmpc")
        times = word.count(letter)
        ending = {
            "SPELL": ".", "SPELL_COUNT": f": {len(word)} letters.", "SPELL_FIRST": f": the first letter is {word[0]}.",
            "SPELL_LAST": f": the last letter is {word[-1]}.",
            "SPELL_LETTER": f": {letter} occurs {times} time{'' if times == 1 else 's'}."
        }[name]
        return self.turn("spelling_forward", name, f"{word} is spelled {letters}{ending}", unseen, "spell",
                         (word, "forward"), x=self.quoted(word), l=letter)

    def spelling_backward(self, unseen):
        word = self.list_word(unseen)
        return self.turn("spelling_backward", "SPELL_BACK", self.backwards(word), unseen, "spell", (word, "backward"),
                         x=self.quoted(word))

    def backwards(self, word):
        return f"{word} is spelled {spelled(word)}, and backwards {spelled(word[::-1])}."

    def intent(self, category, table, unseen):
        name = self.rng.choice([k for k in table if not unseen or PHRASES[k].unseen])
        dressed = category == "identity" and self.rng.random() < 0.7
        question = self.word(name, unseen, dressed)
        return Turn(category, question, table[name][0], "phrasing" if unseen else "")

    def greeting(self, unseen):
        if self.rng.random() < 0.15:
            name = self.rng.choice(facts.NAMES)
            question = self.word("INTRODUCE", unseen, False, x=name)
            return Turn("greeting", question, f"Nice to meet you, {name}!", "phrasing" if unseen else "")
        return self.intent("greeting", P.GREETINGS, unseen)

    def identity(self, unseen):
        return self.intent("identity", P.IDENTITY, unseen)

    def unknown(self, unseen):
        rng, kind = self.rng, self.rng.random()
        number = lambda: rng.randint(0, 99)
        large = lambda: rng.randint(100, 9999) if rng.random() < 0.8 else rng.randint(10_000, 10_000_000)
        if kind < 0.10:
            return self.turn("unknown", "UNKNOWN_NUMBERS", U.REFUSAL_NUMBERS, unseen, n=number, m=large)
        if kind < 0.18:
            place = rng.choice(facts.UNKNOWN_PLACES) if rng.random() < 0.6 else invented_word(rng).capitalize()
            return self.turn("unknown", "UNKNOWN_CAPITAL", U.REFUSAL_CAPITAL, unseen, x=place)
        if kind < 0.26:
            known = rng.choice(rng.choice(list(facts.UNITS.values()))[1:])
            sides = [rng.choice(facts.UNKNOWN_UNITS), known if rng.random() < 0.8 else rng.choice(facts.UNKNOWN_UNITS)]
            rng.shuffle(sides)
            return self.turn("unknown", "UNKNOWN_UNIT", U.REFUSAL_UNIT, unseen, n=number, big=sides[0], small=sides[1])
        return self.turn("unknown", "UNKNOWN", U.REFUSAL, unseen, n=number)

    # Follow-ups.

    def follow(self, last, unseen):
        """A question that only makes sense after `last`, or None."""
        rng = self.rng
        if rng.random() < 0.1:
            return self.turn("follow_up", "REPEAT", last.answer, unseen, last.topic, last.about)
        if last.topic == "capital":
            country, city = rng.choice(list(facts.CAPITALS.items()))
            return self.turn("follow_up", "FOLLOW_CAPITAL", f"The capital of {country} is {city}.", unseen, "capital",
                             (country,), x=country)
        if last.topic == "spell":
            word, direction = last.about
            if direction == "forward":
                return self.turn("follow_up", "FOLLOW_BACK", self.backwards(word), unseen, "spell", (word, "backward"))
            return self.turn("follow_up", "FOLLOW_FORTH", f"{word} is spelled {spelled(word)}.", unseen, "spell",
                             (word, "forward"))
        if last.topic in ("after", "before"):
            unit, x, result = last.about
            names = facts.DAYS if unit == "day" else facts.MONTHS
            way = rng.choice(["after", "before"])
            if way == last.topic:  # the same way again: one step on
                x = result
            step = 1 if way == "after" else -1
            found = names[(names.index(x) + step) % len(names)]
            return self.turn("follow_up", f"FOLLOW_{way.upper()}", f"The {unit} {way} {x} is {found}.", unseen, way,
                             (unit, x, found))
        if last.topic == "unit":
            big, small, factor, most, forward = last.about
            while held_out(f"unit:{big}>{small}:{10 * (n := rng.randint(2, min(most, 99)))}"):
                pass
            count, result = (n, n * factor) if forward else (n * factor, n)
            source, target = [facts.UNITS[u][1] for u in ((big, small) if forward else (small, big))]
            return self.turn("follow_up", "FOLLOW_UNIT", f"{count} {source} = {result} {target}.", unseen, "unit",
                             last.about, n=count)
        return None

    # Conversations.

    def system(self):
        return self.rng.choice(SYSTEM_PROMPTS)

    def turns(self, count):
        """`count` turns of training material; now and then several of one category in a row."""
        rng, out = self.rng, []
        names, weights = list(CATEGORIES), list(CATEGORIES.values())
        sticky = rng.choices(names, weights)[0] if rng.random() < 0.25 else None
        while len(out) < count:
            turn = self.follow(out[-1], False) if out and rng.random() < 0.15 else None
            out.append(turn or self.ask(sticky if sticky and rng.random() < 0.7 else rng.choices(names, weights)[0]))
        return out

    def held_out_question(self, category):
        """(earlier turns, held-out turn) of an evaluated category."""
        if category == "conversation":
            return self.turns(self.rng.randint(2, 6)), self.ask(self.rng.choice(list(CATEGORIES)), True)
        if category != "follow_up":
            return [], self.ask(category, True)
        while True:
            earlier = self.turns(self.rng.randint(1, 2))
            if earlier[-1].topic and (turn := self.follow(earlier[-1], True)):
                return earlier, turn


def questions(seed, per_category):
    """The held-out questions as records; `expected` is the whole answer, compared after trimming white space."""
    records, seen = [], set()
    for category in EVALUATED:
        asker, count = Asker(random.Random(f"{seed}:{category}")), 0
        for _ in range(200 * per_category):
            earlier, turn = asker.held_out_question(category)
            if count == per_category:
                break
            key = (category, normal("".join(t.question for t in earlier) + turn.question))
            if key in seen:
                continue
            seen.add(key)
            count += 1
            messages = [{"role": "system", "content": asker.system()}] if asker.rng.random() < 0.2 else []
            for t in earlier:
                messages += [{"role": "user", "content": t.question}, {"role": "assistant", "content": t.answer}]
            messages.append({"role": "user", "content": turn.question})
            records.append({"id": f"{category}-{count:03}", "category": category, "held_out": turn.held_out,
                            "messages": messages, "expected": turn.answer})
    return records


def main():
    path = sys.argv[1]
    records = questions(seed=2026, per_category=60)
    head = {"rule": "The answer, trimmed of white space, equals `expected`. Greedy decoding.", "seed": 2026}
    lines = ",\n".join("  " + json.dumps(r, ensure_ascii=False) for r in records)
    with open(path, "w") as out:
        out.write(json.dumps(head)[:-1] + ', "questions": [\n' + lines + "\n]}\n")


if __name__ == "__main__":
    main()
