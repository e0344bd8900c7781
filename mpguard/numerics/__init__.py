"""Sensitivity: measure how much each layer of a model loses in each low-precision format.

    probe        in the processes of the run: hooks on a share of the layers at each step, lines of numbers
    session      starts the probe of a run that `mpguard sensitivity` has started, and ends the run
    api          `mpguard.sensitivity`: the same in a loop over batches
    layers       what was measured of a layer: ratios, drift, shares of values
    proposal     a recipe per layer that keeps the worst loss under a bound, and its cost
    report       `Sensitivity`: the layers of a run sorted by loss, JSON
    request      starts the script, follows it, tries the proposal
    write        the proposal in mp.yaml
    page         the report as an HTML page

What is measured is in `mpguard.nn.layer_error`, the formats in `mpguard.nn.number_formats`. The package is not called
`sensitivity`, because a package of that name would replace the function `mpguard.sensitivity`. Importing it imports
nothing else.
"""
