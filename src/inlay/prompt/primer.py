"""The primer: sample text in front of a module while it is encoded under ``primed``.

A module that is encoded as the first text of a prompt draws more attention than it does behind other modules, so an
answer overweights it. Behind a primer, its states are those of a later module. No prompt reads the primer.
"""

from __future__ import annotations

#: Short passages of several kinds: history, science, minutes, advice, biography, instructions.
PASSAGES = (
    "The harbour town of Brannock grew around a shallow bay where fishing boats could be pulled ashore. In 1782 a "
    "stone pier was built with money from the salt trade, and within twenty years the town had three shipyards. Most "
    "families lived from herring, which was smoked and sold inland. When the railway came in 1861, the market moved "
    "to the station, and the old fish hall became a school.",
    "Lichens are made of two partners that live together. A fungus forms the body and holds water, while an alga "
    "inside makes sugar from sunlight. Because neither needs soil, lichens grow on bare rock, roofs and bark. They "
    "grow slowly, often less than a millimetre a year, and some in the Arctic are thought to be more than 4,000 years "
    "old. Many are sensitive to sulphur dioxide, so scientists use them to judge the air.",
    "The board met on Tuesday to review the plan for the new library. Ms Okafor reported that the building will cost "
    "4.2 million, of which the region pays a third. The reading room faces north to keep the light even. Work begins "
    "in May and should end within eighteen months. Two members asked for more bicycle stands; the architect agreed to "
    "add forty near the east door.",
)
PRIMER = "".join(f"{text}\n\n" for text in PASSAGES)
