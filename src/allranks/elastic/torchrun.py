"""The old name of a part of `allranks.elastic.world`; scripts of 0.1.0 import ElasticTrainingConfig from here."""

from __future__ import annotations

import warnings

from allranks.elastic.world import ElasticTrainingConfig

__all__ = ["ElasticTrainingConfig"]
warnings.warn("allranks.elastic.torchrun is now allranks.elastic.world", DeprecationWarning, stacklevel=2)
