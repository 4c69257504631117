"""A UNet of diffusers that learns to remove noise, with Accelerate, as its examples do, over two ranks."""

import torch
from accelerate import Accelerator
from diffusers import DDPMScheduler, UNet2DModel
from diffusers.optimization import get_cosine_schedule_with_warmup
from diffusers.training_utils import EMAModel

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
model = UNet2DModel(
    sample_size=8, in_channels=3, out_channels=3, layers_per_block=1, block_out_channels=(8, 16), norm_num_groups=4,
    down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
)  # fmt: skip
average = EMAModel(model.parameters())
noise_scheduler = DDPMScheduler(num_train_timesteps=100)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
schedule = get_cosine_schedule_with_warmup(optimizer, 2, 20)
data = torch.utils.data.DataLoader(torch.randn(160, 3, 8, 8), batch_size=2, shuffle=True)
model, optimizer, data, schedule = accelerator.prepare(model, optimizer, data, schedule)
for images in data:
    with accelerator.accumulate(model):
        noise = torch.randn_like(images)
        steps = torch.randint(0, 100, (len(images),))
        guess = model(noise_scheduler.add_noise(images, noise, steps), steps, return_dict=False)[0]
        accelerator.backward(torch.nn.functional.mse_loss(guess, noise))
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    if accelerator.sync_gradients:
        average.step(model.parameters())
accelerator.wait_for_everyone()
print("trained")
accelerator.end_training()
