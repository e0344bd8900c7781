"""Launch: start a run under its policy.

    launcher      `mpguard launch`: resolves the policy once, refuses what cannot be in force, starts the workers
    preflight     the checks that need no training: configs that the stock libraries silently degrade
    startup_hook  the module that the line in `mpguard_hook.pth` imports, for `accelerate launch --config mp.yaml`
    build_locks   lock files of torch extensions that no running process holds
    worker        `python -m mpguard.run`: runs the training script under its policy

Importing this package imports nothing else.
"""
