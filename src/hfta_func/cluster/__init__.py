"""Beyond one machine: executors for :func:`hfta_func.fit` and ``tune.run`` whose workers run anywhere.

``ray`` trains in actors of a Ray cluster and needs ``pip install 'hfta_func[cluster]'``; ``torchrun`` in the ranks that the
program of this name has started.
"""

from hfta_func.cluster.ray_actors import RayPool as RayPool
from hfta_func.cluster.ray_actors import ray as ray
from hfta_func.cluster.ray_actors import trainable as trainable
from hfta_func.cluster.torchrun_ranks import torchrun as torchrun
