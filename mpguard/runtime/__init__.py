"""Run time: put the policy in force in a training process, and prove that it is.

Modules of this package:

    plan         `Plan`: policy, engine and number of processes of a run, and how workers inherit them
    activation   puts a plan in force in this process: patches, hooks and the guard
    guard        `Guard`: when an optimizer is proven, how long the proof may take, when it is repeated
    inspection   `Inspection`: one step is observed, compared, published, agreed on and concluded
    run_state    `RunState`: what is known of the run, and how it fails; `step_counter`, `script_guard`, `run_end`
    last_lines   what `mpguard launch` prints last
    progress     `Progress`: the steps of an optimizer over the whole run, and which of them are checked
    meter        `Meter`: time, loss and memory of each step, for `mpguard tune`
    casts        casts of weights that are trained, and the line of the script that casts them
    reporter     `Reporter`: prints and writes the proof, failures and overrides
    messages     texts that the launcher and the workers share
    checkpoints  what checkpoints save and load: dtypes, and the amax history of delayed scaling
    crashes      explains a script's crash about dtypes or loss scaling
    exit_hooks   the exit status of a process whose run is not in force

Sub-packages:

    launch/      starts a run: the launcher, the checks before any worker starts (`preflight`), the hook for
                 `accelerate launch --config` (`startup_hook`), and `python -m mpguard.run` (`worker`)
    patches/     the functions of libraries that are wrapped: one module per library, one `Patch` with its reason per
                 function (`table` applies them), and `import_hooks`, which applies them as modules are imported
    proof/       observes what a process really does (`recorder`, `account`, `fp8`, `observe`), compares it with
                 the policy (`compare`) and makes all ranks agree on the result (`consensus`)

Importing this package imports nothing else, because the startup hook imports it when the interpreter starts.
"""
