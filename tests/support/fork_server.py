"""What the server of forks imports last: one full garbage collection, so that its forks do none.

A full collection comes once the objects since the last one are a quarter of those that it kept. The last one of the
server is early in its imports: each fork would soon traverse, and so copy, all that the server has imported, which was
a third of what a short program costs.
"""

import gc

gc.collect()
