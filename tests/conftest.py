"""Tests run side by side on few cores: one thread each."""

import torch

torch.set_num_threads(1)
