"""What the names of Keras, Lightning, Hugging Face, Accelerate, scikit-learn and PyTorch mean here.

Spelling is a poor guide: the nearest name to Lightning's `on_train_start` is `on_train_end`, its opposite.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

_MEANINGS: dict[str, dict[str, str]] = {
    "hook": {
        "on_train_begin": "on_train_start on_sanity_check_start on_init_end",
        "on_train_end": "on_fit_end",
        "on_checkpoint": "on_save on_checkpoint_saved",
        "on_epoch_begin": "on_epoch_start on_train_epoch_start",
        "on_epoch_end": "on_train_epoch_end on_log",
        "on_train_batch_begin": "on_train_batch_start on_batch_begin on_batch_start on_step_begin on_before_zero_grad",
        "on_before_optimizer_step": "on_pre_optimizer_step on_after_backward",
        "on_train_batch_end": "on_batch_end on_step_end on_optimizer_step",
        "on_test_begin": "on_validation_start on_validation_epoch_start on_test_start on_test_epoch_start",
        "on_test_end": "on_test_epoch_end on_evaluate",
        "on_validation_end": "on_validation_epoch_end",
        "on_test_batch_begin": "on_validation_batch_start on_test_batch_start",
        "on_test_batch_end": "on_validation_batch_end on_prediction_step",
        "on_predict_begin": "on_predict_start on_predict_epoch_start",
        "on_predict_end": "on_predict_epoch_end on_predict",
        "on_predict_batch_begin": "on_predict_batch_start",
        "There is no hook between forward and backward": "on_before_backward",
        "Return the state from state_dict(); load_state_dict() restores it": "on_save_checkpoint on_load_checkpoint",
    },
    "loss": {
        "cross_entropy: It takes outputs without a softmax, and y as class indices, or as one-hot rows of floats.": (
            "categorical_crossentropy sparse_categorical_crossentropy softmax_cross_entropy log_loss"
        ),
        "bce_with_logits: It takes outputs without a sigmoid; 'bce' takes probabilities.": (
            "binary_crossentropy sigmoid_cross_entropy binary_cross_entropy_with_logits"
        ),
        "nll: It takes log-probabilities, the outputs of a log_softmax.": "negative_log_likelihood",
        "kl_div: It takes log-probabilities as outputs.": "kld kl_divergence kullback_leibler_divergence",
        "mse": "mean_squared_error l2",
        "mae": "mean_absolute_error",
        "smooth_l1: It is close to log-cosh.": "log_cosh",
        "Pass torch.nn.MultiMarginLoss(), the hinge loss of class indices": "hinge categorical_hinge",
        "Pass torch.nn.MultiMarginLoss(p=2), the squared hinge loss of class indices": "squared_hinge",
        "Pass torch.nn.PoissonNLLLoss(log_input=False), of outputs above 0": "poisson",
        "Pass a module of torch.nn, or a function of (output, y) that returns the mean over samples": (
            "mean_absolute_percentage_error mape mean_squared_logarithmic_error msle cosine_similarity focal dice ctc "
            "binary_focal_crossentropy categorical_focal_crossentropy tversky triplet_margin"
        ),
        "That is an optimizer: the order is DistributedTrainer(model, loss_fn, optimizer)": "adam adamw sgd rmsprop",
    },
    "metric": {
        "accuracy": "acc accuracy_score categorical_accuracy sparse_categorical_accuracy binary_accuracy",
        "top_5: Any number will do, as in 'top_3'.": (
            "top_k top_k_accuracy top_5_accuracy top_k_categorical_accuracy sparse_top_k_categorical_accuracy"
        ),
        "f1": "f1_score f_score fbeta f1_binary",
        "precision": "precision_score positive_predictive_value ppv",
        "recall": "recall_score sensitivity true_positive_rate tpr",
        "recall_macro: It is the mean over classes, which is the balanced accuracy.": (
            "balanced_accuracy balanced_accuracy_score"
        ),
        "specificity": "true_negative_rate tnr",
        "jaccard": "jaccard_score jaccard_index iou mean_iou miou binary_iou",
        "calibration_error": "ece expected_calibration_error",
        "auc": "auroc roc_auc roc_auc_score roc_auc_ovr",
        "average_precision": "average_precision_score pr_auc auprc",
        "cohen_kappa": "kappa cohen_kappa_score",
        "matthews": "mcc matthews_corrcoef",
        "mae": "mean_absolute_error l1",
        "mse": "mean_squared_error l2",
        "rmse": "root_mean_squared_error",
        "r2": "r2_score r_squared",
        "mape": "mean_absolute_percentage_error",
        "msle": "mean_squared_log_error mean_squared_logarithmic_error",
        "pearson": "pearsonr pearson_corrcoef correlation",
        "spearman": "spearmanr spearman_corrcoef",
        "explained_variance": "explained_variance_score",
        "Perplexity is math.exp of a mean cross-entropy, such as history.val_losses[-1]": "perplexity ppl",
        "Pass metrics=[cx.metrics.ConfusionMatrix()], which draws it": "confusion_matrix classification_report",
        "Pass a function of all outputs and targets, as in metrics={'mine': cx.metrics.WholeSet(function)}": (
            "bleu sacrebleu chrf rouge meteor wer cer map mean_average_precision ndcg seqeval squad"
        ),
    },
    "optimizer": {
        "adam: fit uses PyTorch's fused kernel by itself.": "fused_adam",
        "adamw: fit uses PyTorch's fused kernel by itself.": "adamw_torch adamw_hf adamw_torch_fused adamw_apex_fused",
        "sgd: With momentum, pass torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9).": "momentum nesterov",
        "Muon is for weight matrices of hidden layers, and PyTorch advises AdamW for the rest: pass optimizers="
        '{"matrices": torch.optim.Muon(matrices), "others": torch.optim.AdamW(others)}': "muon",
        "Pass an optimizer of another package, built with model.parameters()": (
            "lion lamb lars ftrl adamw_bnb_8bit adamw_8bit paged_adamw_8bit paged_adamw_32bit lion_8bit "
            "adabelief adan adahessian adopt apollo d_adaptation galore novograd prodigy ranger schedule_free "
            "schedule_free_adamw shampoo soap sophia"
        ),
        "That is a loss: the order is DistributedTrainer(model, loss_fn, optimizer)": "cross_entropy bce mse mae huber",
    },
    "scheduler": {
        "cosine: Set fit(warmup_steps=...) for a warm-up.": "cosine_annealing cosine_decay cosine_with_warmup",
        "linear: Set fit(warmup_steps=...) for a warm-up.": "polynomial polynomial_decay linear_with_warmup",
        "constant: Set fit(warmup_steps=...) for a warm-up.": "constant_with_warmup",
        'Pass fit(callbacks=[cx.callbacks.ReduceLROnPlateau("val_loss")]), which sees the metric': (
            "reduce_lr_on_plateau reduce_on_plateau plateau"
        ),
        "Pass scheduler=torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=...)": (
            "cosine_with_restarts cosine_annealing_warm_restarts cosine_decay_restarts"
        ),
        'Pass an object, as in scheduler=StepLR(optimizer, 10), scheduler_interval="epoch"': (
            "step multi_step exponential exponential_decay cyclic lambda piecewise_constant inverse_sqrt "
            "inverse_time_decay cosine_with_min_lr warmup_stable_decay"
        ),
    },
    "argument": {
        "accumulation_steps": "accumulate_grad_batches gradient_accumulation_steps gradient_accumulation",
        "batch_size": "per_device_train_batch_size train_batch_size",
        "bucket_size_mb": "bucket_cap_mb",
        "channels_last": "memory_format",
        "checkpoint_dir": "default_root_dir output_dir",
        "checkpoint_every_n_steps": "save_steps every_n_train_steps",
        "clip_norm": "clipnorm clip_grad_norm gradient_clip_val gradient_clipping max_grad_norm max_norm",
        "clip_value": "clipvalue clip_grad_value",
        "compile": "jit_compile torch_compile",
        "device: A visible GPU is taken by itself.": "accelerator no_cuda use_cpu",
        "dynamic_history_size": "growth_interval",
        "effective_batch_size": "global_batch_size",
        "epochs": "max_epochs num_epochs num_train_epochs n_epochs",
        "filepath": "dirpath filename",
        "float32_precision": "float32_matmul_precision matmul_precision tf32",
        "fused_optimizer": "fused",
        "initial_scale": "init_scale",
        "keep_best": "metric_for_best_model save_best_only save_top_k",
        "keep_last": "save_total_limit",
        "load_best": "load_best_model_at_end",
        "log_every_n_steps": "logging_steps",
        "loss_fn": "loss criterion loss_function",
        "learning_rate": "lr",
        "lr": "learning_rate",
        "max_steps": "num_steps num_train_steps total_steps",
        "max_time_seconds": "max_time",
        "metrics: They are names, functions of (output, y), or torchmetrics objects.": "metric",
        "metrics: Pass cx.metrics.WholeSet(compute_metrics), of all predictions.": "compute_metrics",
        "monitor": "metric metric_for_best_model",
        "num_processes: A launcher starts them too: cyxtrain launch -n 4 -- python train.py.": (
            "devices gpus num_gpus num_devices nprocs nproc_per_node"
        ),
        "optimizer": "optim",
        "precision": "autocast bf16 dtype fp16 mixed_precision torch_dtype use_amp",
        "resume": "ckpt_path resume_from resume_from_checkpoint",
        "scheduler": "lr_scheduler lr_scheduler_type lr_schedule",
        "schedulers": "lr_schedulers",
        "save_best_only": "save_top_k",
        "save_weights_only": "weights_only",
        "seed": "random_seed random_state",
        "steps_per_epoch": "limit_train_batches",
        "test_step": "validation_step",
        "train_step: It is a function of (trainer, batch), or a method of a subclass of DistributedTrainer.": (
            "training_step"
        ),
        "use_dynamic_scaling": "enabled",
        "validate_every_n_steps": "eval_steps val_check_interval",
        "validation_batch_size": "per_device_eval_batch_size eval_batch_size",
        "validation_data": (
            "val_loader val_data val_dataset val_dataloader val_dataloaders validation_loader validation_dataset "
            "valid_loader eval_dataset eval_dataloader test_loader test_data test_dataset"
        ),
        "validation_freq": "check_val_every_n_epoch",
        "validation_groups": "groups",
        "validation_stratify": "stratify",
        "validation_split": "test_size val_size val_split validation_size",
        "validation_steps": "limit_val_batches",
        "verbose": "enable_progress_bar disable_tqdm",
        "warmup_steps": "num_warmup_steps warmup_ratio",
        "X": "data dataloaders dataset inputs loader train_loader train_dataloader val_loader test_loader test_data",
        "y": "labels targets",
        "fit, evaluate and predict take arrays, a Dataset or a DataLoader as their first argument": (
            "X data dataloaders dataset inputs loader train_data train_dataloader train_dataloaders train_dataset "
            "train_loader"
        ),
        "fit(X, y) and evaluate(X, y) take it; predict takes X alone": "y labels targets",
        "The optimizer has it, as in torch.optim.Adam(model.parameters(), lr=0.01)": (
            "lr learning_rate weight_decay momentum"
        ),
        'Pass callbacks=[cx.callbacks.EarlyStopping("val_loss", patience=3)]': "patience early_stopping",
        'Pass callbacks=[cx.callbacks.TensorBoard("logs")], or CSVLogger': "logger loggers log_dir report_to",
        "A DataLoader has it, as in fit(DataLoader(dataset, num_workers=4))": (
            "num_workers workers dataloader_num_workers collate_fn persistent_workers prefetch_factor sampler"
        ),
        "A DataLoader has it, and samples go to a GPU from pinned memory by themselves": "pin_memory",
        "Call trainer.enable_gradient_checkpointing() before fit": "gradient_checkpointing",
        "PyTorch runs each step by itself: leave it out": "steps_per_execution run_eagerly",
        "A launcher sets it, as in cyxtrain launch --nnodes 2": "num_nodes num_machines",
        "Gradients are averaged over all ranks as in DDP; each rank holds the whole model": "strategy deepspeed fsdp",
        "Pass optimizer= and scheduler= to the trainer": "configure_optimizers",
        "reduce": "reduce_fx",
        "weight: None is the number of samples of the running batch.": "batch_size",
        "The history has one number per epoch, over all ranks: leave it out": (
            "on_step on_epoch prog_bar sync_dist sync_dist_group rank_zero_only add_dataloader_idx enable_graph"
        ),
    },
    "attribute": {
        "Pass loss_fn, optimizer and metrics to DistributedTrainer(model, loss_fn, optimizer, metrics=...)": (
            "compile configure_optimizers create_optimizer prepare"
        ),
        "callbacks: A list, such as trainer.callbacks.append(...).": "add_callback remove_callback pop_callback",
        "config": "args",
        "epoch": "current_epoch epochs_trained",
        "evaluate": "test validate validation eval score evaluation_loop",
        "Call trainer.fit(X, y, epochs=3) again: it continues training": "partial_fit fit_transform",
        "fit": "train fit_generator training_loop",
        "fit: The step is the method train_step(self, batch).": "training_step compute_loss train_function",
        "history": "callback_metrics logged_metrics log_history losses train_losses loss_curve best_score",
        "get_rank": "global_rank process_index rank",
        "get_world_size": "world_size num_devices num_processes device_ids",
        "is_master": "is_main_process is_global_zero is_world_process_zero is_local_main_process is_local_process_zero",
        "Call cx.get_local_rank()": "local_rank local_process_index",
        "loss_fn": "loss criterion",
        "log: It takes one name and one number; train_step may return a dictionary of them.": "log_dict log_metrics",
        "optimize: It does backward, averages gradients, clips and steps, of one optimizer by name, in a train_step.": (
            "manual_backward backward toggle_optimizer untoggle_optimizer optimizer_step zero_grad"
        ),
        "predict: Of scores, .argmax(1) has the classes.": "predict_proba predict_generator predict_classes transform",
        "Call torch.onnx.export(trainer.model, (X[:1],), path) on rank 0": "export to_onnx to_torchscript",
        "Call fit in a loop, or in an objective of Optuna": "tune tuner lr_find hyperparameter_search",
        "trainer.config has the settings, fit(epochs=3) sets": "get_params set_params hparams save_hyperparameters",
        "Set fit(checkpoint_dir=folder, keep_best='val_loss')": "best_model_path best_model checkpoint_callback",
        "save_checkpoint": "save save_state",
        "load_checkpoint: fit(resume=path) loads one and continues.": "load load_state restore",
        "step": "global_step",
        "Call trainer.set_learning_rates([0.01]); trainer.optimizer.param_groups has the rates": (
            "lr learning_rate learning_rates get_lr get_last_lr"
        ),
        'Pass callbacks=[cx.callbacks.TensorBoard("logs")], or CSVLogger': "logger loggers report_to",
        "stop_training": "should_stop stop",
        "test_step": "validation_step",
        "Call cx.save_weights(trainer.model, path); trainer.save_checkpoint(path) saves optimizers, too": (
            "save_model save_weights save_pretrained push_to_hub"
        ),
        "Call cx.load_weights(trainer.model, path); trainer.load_checkpoint(path) loads optimizers, too": (
            "load_model load_weights load_from_checkpoint from_pretrained"
        ),
        "The model is trainer.model, as in trainer.model.state_dict()": (
            "get_weights set_weights weights trainable_variables parameters named_parameters state_dict "
            "load_state_dict to cuda cpu module unwrap_model layers get_layer"
        ),
        "The device is the model's, next(trainer.model.parameters()).device": "device",
        "Set fit(clip_norm=1.0)": "clip_gradients clip_grad_norm clip_grad_value",
        "Set fit(accumulation_steps=4)": "accumulate no_sync",
        'Set fit(precision="bf16")': "autocast",
        "Call cx.barrier()": "wait_for_everyone",
        "Call cx.all_gather(...); metrics cover all ranks already": "gather gather_for_metrics all_gather reduce",
        "Write if trainer.is_master(): print(...)": "print",
    },
    "option": {
        "-n: It counts the ranks on this machine.": "--nprocs --num-proc --num-processes --world-size",
        "--gpus": "--gpu-ids",
        "--nnodes": "--num-machines",
        "--node-rank": "--machine-rank",
        "--master-addr": "--main-process-ip --rdzv-endpoint",
        "--master-port": "--main-process-port",
        "--restarts": "--max-restarts",
        "--logs": "--log-dir",
    },
}
"""By kind: an answer (a name of ours, perhaps with a remark after ": "; or a sentence), and the names that get it."""

_PREFIX = re.compile(r"(?:(val|valid|validation|eval|test)|train|training)_(?=.)")


def plain(name: str) -> str:
    """Return a name without modules, case, underscores, and "loss" or "LR" at its end."""
    letters = re.sub(r"[^a-z0-9]", "", name.rpartition(".")[2].lower())
    return re.sub(r"(?<=.)(loss|lr)$", "", letters)


_ANSWERS: dict[tuple[str, str], list[str]] = {}
for _kind, _meant in _MEANINGS.items():
    for _answer, _names in _meant.items():
        for _name in _names.split():
            _ANSWERS.setdefault((_kind, plain(_name)), []).append(_answer)


def meanings(name: str, what: str, known: list[str]) -> Iterator[tuple[str, str]]:
    """Yield what a name may mean, as (a name of ours, a remark), or as ("", a sentence).

    `what` is its kind, such as "loss" or "hook named"; an unknown kind counts as a setting, and yields only names.
    """
    kind = what.partition(" ")[0]
    base = name
    is_of_validation = False
    prefix = _PREFIX.match(name)
    if kind == "metric" and prefix is not None:
        base = name[prefix.end() :]
        is_of_validation = prefix[1] is not None
    base = plain(base)
    found = [each for each in known if plain(each) == base]
    table = kind if kind in _MEANINGS else "argument"
    found += _ANSWERS.get((table, base), [])
    if is_of_validation:
        found = [*(f"val_{each}" for each in found), *found]
    for answer in found:
        meant, _, remark = answer.partition(": ")
        if " " not in meant:
            yield meant, remark
        elif kind in _MEANINGS:
            yield "", f"{answer}."
