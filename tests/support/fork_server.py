"""What the server of forks imports last: a garbage collection, and all that is left is frozen.

Else each fork would traverse, and so copy, the half a million objects that the server has imported: as a full
collection comes once the objects since the last one are a quarter of those that it kept, and the last one of the server
is early in its imports, and as mpguard looks for models among all objects. It was half of what a short program costs.
"""

import gc

gc.collect()
gc.freeze()
