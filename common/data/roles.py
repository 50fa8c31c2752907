# SPDX-License-Identifier: Apache-2.0
"""Pairs of generated English sentences that say the same, or the same with the roles swapped; needs no network.

The first sentence is active, the second passive: "The guard praised the tourist." and "The tourist was praised by the
guard." Half of the second sentences have the two people the wrong way round. Pairs of both labels have the same words,
so a bag of words carries no information: only word order does. The pairs show that a classifier learns, not that it
knows English. The idea is that of PAWS (Zhang et al. 2019, arXiv:1904.01130), whose sentences are real.

As in real texts, some people act more often than others: the guard praises the tourist in 17 of 20 events, the tourist
the guard in 3. Looking only at the order in the second sentence is right for 85 % of the pairs; only comparing it with
the first is right for all. Without that intermediate step (`AS_EXPECTED` at 0.5), BERT-tiny with random weights had
learned nothing after two epochs; with it, everything after one.
"""

import itertools
import random

CLASSES = ["0", "1"]  # roles swapped; the same
VALIDATION_EVENTS = 500  # an event makes two pairs, one of each class
AS_EXPECTED = 0.85  # share of the events in which one of the first list acts on one of the second
MOSTLY_ACT = (
    "captain coach detective doctor driver farmer guard guide hunter judge lawyer manager nurse officer pilot priest "
    "professor ranger sailor sheriff soldier teacher trainer waiter"
)
MOSTLY_ACTED_ON = (
    "athlete baby beginner child cousin customer gambler guest newcomer orphan passenger patient pensioner prisoner "
    "pupil robber stranger student suspect swimmer thief tourist visitor witness"
)
VERBS = (
    "accused admired amused blamed called carried chased followed greeted helped ignored invited kicked noticed "
    "praised pushed rescued stopped thanked trained trusted visited warned watched"
)


def role_pairs(seed: int = 0) -> dict[str, list[tuple[str, str, int]]]:
    """The 26,648 pairs of "train" and 1,000 of "validation": both sentences, and 1 if they say the same, else 0.

    They are a pure function of the seed. Pairs 2 i and 2 i + 1 are of one event: they have the same first sentence, and
    second sentences of the same words. An event is a verb and two people, whichever of them acts; no two events have
    all three in common, within a split or across both.
    """
    draw = random.Random(seed)
    events = list(itertools.product(MOSTLY_ACT.split(), MOSTLY_ACTED_ON.split(), VERBS.split()))
    draw.shuffle(events)
    pairs = []
    for agent, patient, verb in events:
        if draw.random() >= AS_EXPECTED:
            agent, patient = patient, agent
        first = f"The {agent} {verb} the {patient}."
        pairs.append((first, f"The {patient} was {verb} by the {agent}.", 1))
        pairs.append((first, f"The {agent} was {verb} by the {patient}.", 0))
    held_out = 2 * VALIDATION_EVENTS
    return {"train": pairs[held_out:], "validation": pairs[:held_out]}
