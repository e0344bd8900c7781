#!/bin/bash
torchrun --nproc_per_node=8 main_mar.py --resume pretrained/mar_base.pth --blr 1.0e-5 --grad_clip 1.0 --cached_path cached_clips
