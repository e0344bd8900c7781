#!/bin/bash
python prepare_data.py -d ./data
python ./deepy.py train.py -d configs 1-3B.yml local_setup.yml
