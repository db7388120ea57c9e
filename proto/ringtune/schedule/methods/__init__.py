"""Training methods, one module each; ``base`` has their interface."""

from ringtune.schedule.methods.base import Method, method, method_class, method_names
from ringtune.schedule.methods.everything import Everything
from ringtune.schedule.methods.hift import Hift
from ringtune.schedule.methods.pipeadapter import PipeAdapter
from ringtune.schedule.methods.ringada import RingAda
from ringtune.schedule.methods.single import Single

__all__ = ["Everything", "Hift", "Method", "PipeAdapter", "RingAda", "Single", "method", "method_class", "method_names"]
