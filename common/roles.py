# SPDX-License-Identifier: Apache-2.0
"""Pairs of generated English sentences that say the same, or the same with the roles swapped; needs no network.

Nobody wrote these sentences: a program puts them together from short lists of words. They show that a classifier
learns, not that it knows English.

The first sentence is active, the second is another form of it: passive, with the time or place at its front, or a cleft
("It was the baker who ..."). Half of the second sentences have who did it and to whom the wrong way round. Either label
has the very same words, so that counting words tells nothing; the order must be understood. The idea is that of PAWS
(Zhang et al. 2019, "PAWS: Paraphrase Adversaries from Word Scrambling", arXiv:1904.01130), whose sentences are real.
"""

import itertools
import random

CLASSES = ["0", "1"]  # roles swapped; the same
VALIDATION_EVENTS = 750  # an event makes two pairs, one of each class
NOUNS = (
    "actor artist baker banker barber boxer builder butcher captain carpenter chemist cleaner clerk coach cook "
    "dancer dentist doctor driver farmer fisher gardener grocer guard guide hunter judge lawyer manager miner "
    "musician nurse painter pilot plumber poet porter priest sailor singer soldier student tailor teacher tourist "
    "trader waiter writer"
)
ADJECTIVES = "angry brave clever famous happy honest lonely nervous old polite proud quiet rich strong tired young"
VERBS = (
    "accused admired amused blamed called carried chased followed greeted helped ignored invited kicked noticed "
    "praised pushed rescued stopped thanked trained trusted visited warned watched"
)
WHEN_OR_WHERE = (
    "in the park, in the street, at the station, at the market, near the river, near the bridge, behind the school, "
    "after lunch, before dinner, on Monday, on Friday, last week, last night, this morning, in April, in winter"
)
FORMS = (
    "{patient} was {verb} by {agent} {when}",
    "{when} {patient} was {verb} by {agent}",
    "{when} {agent} {verb} {patient}",
    "it was {agent} who {verb} {patient} {when}",
    "it was {patient} who was {verb} by {agent} {when}",
    "it was {when} that {agent} {verb} {patient}",
)


def role_pairs(seed: int = 0) -> dict[str, list[tuple[str, str, int]]]:
    """The pairs of each split: the first sentence, the second, and 1 where both say the same, else 0.

    Pairs 2 i and 2 i + 1 are of one event: they have the same first sentence, and second sentences of the same form and
    the same words. An event is a verb and two people, whichever of them does it; no two events have these in common,
    within a split or across both.

    Args:
        seed: the pairs are a pure function of it.

    Returns:
        "train" and "validation"; the latter has 1,500 pairs.
    """
    draw = random.Random(seed)
    events = list(itertools.product(itertools.combinations(NOUNS.split(), 2), VERBS.split()))
    draw.shuffle(events)
    pairs = [pair for people, verb in events for pair in _two_pairs(draw, people, verb)]
    held_out = 2 * VALIDATION_EVENTS
    return {"train": pairs[held_out:], "validation": pairs[:held_out]}


def _two_pairs(draw: random.Random, people: tuple[str, str], verb: str) -> list[tuple[str, str, int]]:
    agent, patient = (_phrase(draw, noun) for noun in draw.sample(people, 2))
    when, form = draw.choice(WHEN_OR_WHERE.split(", ")), draw.choice(FORMS)
    first = _sentence("{agent} {verb} {patient} {when}", agent, verb, patient, when)
    return [
        (first, _sentence(form, agent, verb, patient, when), 1),
        (first, _sentence(form, patient, verb, agent, when), 0),
    ]


def _phrase(draw: random.Random, noun: str) -> str:
    """The noun, every other time with an adjective."""
    return f"the {draw.choice(ADJECTIVES.split())} {noun}" if draw.random() < 0.5 else f"the {noun}"


def _sentence(form: str, agent: str, verb: str, patient: str, when: str) -> str:
    text = form.format(agent=agent, verb=verb, patient=patient, when=when)
    return text[0].upper() + text[1:] + "."
