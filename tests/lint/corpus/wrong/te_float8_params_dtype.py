import torch
import transformer_engine.pytorch as te

layer = te.Linear(768, 768, params_dtype=torch.float8_e4m3fn)  # ! MPG415
