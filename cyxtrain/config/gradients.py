"""Settings of the gradient exchange."""

from __future__ import annotations

import math

from cyxtrain.config.settings import is_number, require, require_booleans, require_choice, require_integer, settings


@settings
class DDPConfig:
    """How DistributedDataParallel averages gradients."""

    broadcast_parameters: bool = True
    """Start with rank 0's parameters and buffers on every rank."""
    bucket_size_mb: float = 25
    """MiB of gradients that are averaged together."""
    find_unused_parameters: bool = False
    """Allow parameters that the loss does not use. False: an error that names them."""
    gradient_as_bucket_view: bool = True
    """Let `.grad` be a view of the bucket, which saves a copy of all gradients."""
    static_graph: bool = False
    """The same parameters are used in every step; those never used are allowed."""
    compression: str | None = None
    """Compress gradients: "fp16", "bf16", "powersgd", or None."""
    matrix_approximation_rank: int = 1
    """For "powersgd": columns of the factor matrices; more are more accurate and larger."""

    def validate(self) -> None:
        """Refuse invalid settings.

        Raises:
            ConfigError: With the field, what it must be and what it is.
        """
        require(
            is_number(self.bucket_size_mb) and 0 < self.bucket_size_mb < math.inf,
            f"DDPConfig.bucket_size_mb must be a number of MiB above 0, got {self.bucket_size_mb!r}.",
        )
        require_choice("DDPConfig", "compression", self.compression, (None, "fp16", "bf16", "powersgd"))
        require_integer("DDPConfig", "matrix_approximation_rank", self.matrix_approximation_rank, 1)
        require(
            self.compression == "powersgd" or self.matrix_approximation_rank == 1,
            "DDPConfig.matrix_approximation_rank is set, and only compression='powersgd' approximates matrices: set "
            f"that, too; compression is {self.compression!r}.",
        )
        require_booleans("DDPConfig", self)
