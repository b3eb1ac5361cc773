"""Every call of the guides' API sections, as they have it; each rank runs it in an empty folder."""

from pathlib import Path

import torch

import cyxtrain as cx
import cyxtrain.distributed as dist

# --- DistributedConfig ---
config = dist.DistributedConfig()
config = dist.DistributedConfig.from_environment()
config.master_addr = "127.0.0.1"
config.backend = dist.BackendType.CPU
config.timeout_ms = 30000
assert config.rank is None or config.rank < (config.world_size or 0)

# --- Processes ---
dist.init(config)
dist.init(config)
rank, world_size = dist.get_rank(), dist.get_world_size()
assert dist.is_initialized()
assert dist.is_master() == (rank == 0)
assert dist.get_local_rank() == rank
assert cx.distributed.get_rank() == rank

# --- Collectives ---
everyone = range(world_size)
tensor = torch.tensor([rank + 1.0])
dist.all_reduce(tensor)
assert tensor.item() == sum(other + 1 for other in everyone)
dist.all_reduce(tensor, op=dist.ReduceOp.AVG)
dist.broadcast(tensor, src=0)
gathered = [torch.zeros(1) for _ in everyone]
dist.all_gather(gathered, torch.tensor([float(rank)]))
assert torch.cat(gathered).tolist() == list(map(float, everyone))
part = torch.zeros(1)
dist.reduce_scatter(part, [torch.ones(1) for _ in everyone], op=dist.ReduceOp.SUM)
dist.scatter(part, [torch.full((1,), float(other)) for other in everyone] if rank == 0 else None, src=0)
assert part.item() == rank
dist.gather(part, gathered if rank == 0 else None, dst=0)
dist.reduce(part, dst=0, op=dist.ReduceOp.MAX)
dist.barrier()
if world_size > 1 and rank < 2:
    (dist.send if rank == 0 else dist.recv)(tensor, 1 - rank)

# --- DistributedSampler ---
X, y = torch.randn(21, 4, generator=torch.Generator().manual_seed(0)), torch.arange(21) % 3
sampler = dist.DistributedSampler(len(X), shuffle=True, seed=42, drop_last=False)
sampler.set_epoch(1)
indices = sampler.get_indices()
assert len(indices) == len(sampler) == sampler.local_size() == -(-21 // world_size)
assert sampler.total_size() == 21
assert sampler.padded_size() == sampler.local_size() * world_size
state = sampler.state_dict()
sampler.load_state_dict(state)
assert list(sampler) == indices

# --- DistributedBatchIterator ---
batch_iter = dist.DistributedBatchIterator(sampler, batch_size=4)
batch_iter.reset(0)
seen = 0
while batch_iter.has_next():
    batch = batch_iter.next()
    seen += len(batch)
assert seen == sampler.local_size()
batch_iter.reset(epoch=1)
assert batch_iter.num_batches() == len(batch_iter) == len(list(batch_iter)) == -(-sampler.local_size() // 4)

# --- DistributedDataParallel ---
ddp_config = dist.DDPConfig()
ddp_config = dist.DDPConfig(
    broadcast_parameters=True,
    bucket_size_mb=25,
    find_unused_parameters=False,
    gradient_as_bucket_view=True,
    static_graph=False,
)
model, loss_fn = torch.nn.Linear(4, 3), torch.nn.CrossEntropyLoss()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
ddp = dist.DistributedDataParallel(model, ddp_config)
output = ddp.forward(X[indices])
loss = loss_fn(output, y[indices])
ddp.backward(loss)
gradients = ddp.sync_gradients()
assert set(gradients) == {"weight", "bias"}
ddp.update_parameters(optimizer)
(gradient,) = torch.autograd.grad(loss_fn(output := ddp(X[indices]), y[indices]), output)
ddp.backward(gradient)
ddp.update_parameters(optimizer)
with ddp.no_sync():
    loss_fn(ddp(X[indices]), y[indices]).backward()
ddp.update_parameters(optimizer)
ddp.check_replicas()
assert ddp.get_model() is ddp.module is model
assert (ddp.get_rank(), ddp.get_world_size(), ddp.is_master()) == (rank, world_size, rank == 0)

# --- DistributedTrainingConfig, DistributedTrainer ---
folder = Path.cwd()
training = dist.DistributedTrainingConfig(
    epochs=2,
    batch_size=4,
    effective_batch_size=None,
    shuffle=True,
    seed=42,
    verbose=False,
    log_every_n_batches=0,
    checkpoint_every_n_epochs=1,
    checkpoint_dir=str(folder),
    save_on_master_only=True,
    validation_split=0.0,
)
training.epochs = 1
trainer = dist.DistributedTrainer(model, loss_fn, optimizer, ddp_config=ddp_config)
history = trainer.fit(X, y, training)
assert len(history.train_losses) == len(history.train_accuracies) == 1
history = trainer.fit(X, y, X[:5], y[:5], training)
assert len(history.val_losses) == len(history.val_accuracies) == 1
assert history.total_time_seconds > 0 < history.samples_per_second
assert history.effective_batch_size == 4 * world_size
assert history.world_size == world_size
assert isinstance(history, dist.DistributedTrainingHistory)
loss, accuracy = trainer.evaluate(X, y)
loss, accuracy = trainer.evaluate(X, y, distributed=True)
assert trainer.predict(X).shape == (21, 3)
path = folder / f"model_{rank}.ckpt"
trainer.save_checkpoint(path)
dist.barrier()
assert path.exists() == trainer.is_master()
trainer.load_checkpoint(path)
assert (trainer.get_rank(), trainer.get_world_size()) == (rank, world_size)

# --- DistributedAMPTrainer ---
amp_config = dist.create_default_amp_config(use_dynamic_scaling=True, dynamic_history_size=2000, initial_scale=2.0**15)
own = torch.nn.Linear(4, 3)
amp = dist.DistributedAMPTrainer(own, amp_config, accumulation_steps=1, learning_rate=1e-3, loss_fn=loss_fn)
loss = amp.training_step((X[indices], y[indices]))
assert (amp.rank, amp.world_size, amp.step) == (rank, world_size, 1)

dist.finalize()
assert not dist.is_initialized()
print(f"rank {rank} of {world_size}: every line ran")
