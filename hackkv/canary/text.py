"""The canary's text: plain English of our own, with names and figures that come back far from where they stood.

A model that has lost its KV cache still writes grammar; it forgets who Maren was. The end of the text asks for what its
beginning said, across several pages of any codec.
"""

from __future__ import annotations

from typing import Final

TEXT: Final = """\
The harbour at Kell has two lights. The northern one is called the Lantern and was built in 1871; the southern one \
has no name, and fishermen call it the Stump. For forty years both were kept by one family. Maren Holt climbed the \
142 steps of the Lantern every evening, and her brother Tobias rowed across the bay to light the Stump, in all \
weathers but one.

That one came in the autumn of 1904. For three days the wind had turned slowly from the west to the north, and on \
the third evening the sea stood so high in the bay that the boat could not leave the shore. Tobias lit a fire of \
driftwood on the hill behind the church instead. He fed it until morning with two broken doors, a cart without \
wheels, and the fence of a neighbour, who was paid for it later. Five ships came in that night. The captain of the \
last one, a schooner with a load of salt and oranges, said that he had counted three lights and thought himself in \
the wrong country.

How does a small lamp become a light that can be seen twenty miles away? A flame sends its light in every \
direction, and most of it is lost. A lens gathers what would go up and down and bends it into a flat beam. A whole \
piece of glass of that size would be too heavy to carry and too thick to be clear, so it is cut into rings, each \
of which bends the light a little more than the one inside it. If the lens turns, the beam sweeps over the water, \
and a sailor sees a flash. Because every lighthouse has its own rhythm, a sailor who counts the seconds between \
two flashes knows which one it is. The Lantern flashes twice every ten seconds. The Stump, which never had a lens \
that turned, shows a steady red.

In her diary Maren wrote little about storms and much about work. The list for a Monday reads:

1. Trim the wick, and clean the glass with vinegar and a soft cloth.
2. Wind the clock that turns the lens. It runs for nine hours.
3. Carry up oil: six cans in winter, four in summer.
4. Write down the weather, the wind, and every ship that passes.
5. Sleep, if there is time.

The lights are electric now, and nobody lives in the towers. A computer in a town sixty miles away turns them on, \
and once a month an engineer comes by car to look at the batteries. Visitors may climb the northern tower on \
Sundays. At the top, beside the window, hangs a photograph of a woman in a dark coat with an oil can in each hand. \
Below it a card says that this is the keeper who climbed 142 steps every evening for forty years, Maren Holt. Her \
brother, who once burned his neighbour's fence to bring five ships home, has no photograph. But every year, on an \
evening in autumn, the children of Kell carry driftwood up the hill behind the church, and light a fire for \
Tobias.
"""

TOKENS: Final = 600
"""The most tokens of the text that are read."""
