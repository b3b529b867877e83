# The notes' listing that begins. Corrected: the model, the dataloader and the optimizer are defined.
from accelerate import Accelerator
accelerator = Accelerator()
# define model, dataloader and optimizer)
model, optim, data = accelerator.prepare(model, optim, data)
