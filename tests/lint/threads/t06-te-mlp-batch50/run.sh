#!/bin/bash
python train_te_mlp.py --data features.pt --batch-size 50 --epochs 10 --fp8
