from policies.mixed_precision import bfSixteen, bfSixteen_mixed, fp32_policy, fpSixteen
