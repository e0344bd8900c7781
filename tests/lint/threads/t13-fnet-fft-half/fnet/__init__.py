from .model import FNetForPreTraining
