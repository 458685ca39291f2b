"""A Ray cluster of a head and a second node, of one CPU each, until standard input closes.

It prints a line of JSON: the address, and the id of the process that started all others of the second node.
"""

import json
import sys

from ray.cluster_utils import Cluster

ONE = {"num_cpus": 1, "object_store_memory": 100 * 2**20, "include_dashboard": False}

if __name__ == "__main__":
    cluster = Cluster(initialize_head=True, head_node_args=ONE)
    second = cluster.add_node(num_cpus=1, object_store_memory=ONE["object_store_memory"])
    (raylet,) = second.all_processes["raylet"]
    sys.stdout.write(json.dumps([cluster.address, raylet.process.pid]) + "\n")
    sys.stdout.flush()
    sys.stdin.read()
    cluster.shutdown()
