import torch
from diffusers import DDPMScheduler, UNet2DModel
from torch.utils.data import DataLoader

from accelerate import Accelerator
from accelerate.utils import set_seed

set_seed(1)
accelerator = Accelerator(gradient_accumulation_steps=2)
# The noise of a sample belongs to the sample, so that every layout adds the same.
data = [
    {"image": torch.randn(1, 8, 8), "noise": torch.randn(1, 8, 8), "time": int(torch.randint(0, 50, ()))}
    for _ in range(48)
]
loader = DataLoader(data, 4, shuffle=True)
noise = DDPMScheduler(num_train_timesteps=50)
model = UNet2DModel(
    sample_size=8, in_channels=1, out_channels=1, layers_per_block=1, block_out_channels=(8, 16), norm_num_groups=4,
    down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    attention_head_dim=4,
)  # fmt: skip
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for _epoch in range(2):
    for batch in loader:
        with accelerator.accumulate(model):
            noisy = noise.add_noise(batch["image"], batch["noise"], batch["time"])
            loss = torch.nn.functional.mse_loss(model(noisy, batch["time"], return_dict=False)[0], batch["noise"])
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
