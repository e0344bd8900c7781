#!/bin/bash
python deepy.py train.py -d configs 1-3B.yml local_setup.yml
