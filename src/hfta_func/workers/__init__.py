"""Worker processes, and the executors that call functions in them."""

from hfta_func.workers.pool import Executor as Executor
from hfta_func.workers.pool import WorkerPool as WorkerPool
