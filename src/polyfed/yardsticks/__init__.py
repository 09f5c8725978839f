"""Rows that a comparison is measured by, named, configured and listed like methods: what a site reaches without a
message, and what everybody's data in one place would give."""

from polyfed.yardsticks.own import Commonest as Commonest
from polyfed.yardsticks.own import OwnLinear as OwnLinear
from polyfed.yardsticks.own import OwnTrees as OwnTrees
from polyfed.yardsticks.yardstick import PooledOracle as PooledOracle
from polyfed.yardsticks.yardstick import Yardstick as Yardstick
