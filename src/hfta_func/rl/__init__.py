"""Populations in reinforcement learning: agents, environments, replay and updates as one program.

Needs ``pip install 'hfta_func[rl]'``. Import it by name: ``from hfta_func import rl``.
"""

from hfta_func.rl.buffers import Replay as Replay
from hfta_func.rl.buffers import n_step as n_step
from hfta_func.rl.buffers import replay as replay
from hfta_func.rl.buffers import sample as sample
from hfta_func.rl.buffers import written as written
from hfta_func.rl.classic import Acrobot as Acrobot
from hfta_func.rl.classic import CartPole as CartPole
from hfta_func.rl.classic import MountainCar as MountainCar
from hfta_func.rl.classic import MountainCarContinuous as MountainCarContinuous
from hfta_func.rl.classic import Pendulum as Pendulum
from hfta_func.rl.environment import Environment as Environment
from hfta_func.rl.environment import Running as Running
from hfta_func.rl.environment import advance as advance
from hfta_func.rl.environment import episode_metrics as episode_metrics
from hfta_func.rl.environment import start as start
from hfta_func.rl.gymnasium_envs import GymnasiumEnvs as GymnasiumEnvs
from hfta_func.rl.rollouts import Moments as Moments
from hfta_func.rl.rollouts import discounted as discounted
from hfta_func.rl.rollouts import gae as gae
from hfta_func.rl.rollouts import make_policy as make_policy
from hfta_func.rl.rollouts import minibatches as minibatches
from hfta_func.rl.rollouts import moments as moments
from hfta_func.rl.rollouts import normalised as normalised
from hfta_func.rl.rollouts import observed as observed
from hfta_func.rl.rollouts import rollout as rollout
