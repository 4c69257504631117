"""Two nodes, as network namespaces: the trainer is on one, router and reward server are on the other. The reward server
does not answer. Needs root."""

import subprocess
import sys
import threading

from job import main, post, ready, serve, tell

NODES = {"nodea": "10.213.7.1", "nodeb": "10.213.7.2"}


def reward(port):
    def score(path, body):
        if body["step"] == 3:
            ready()
            threading.Event().wait()  # <- here
        return {"reward": 1}

    serve(port, score)


def router(port, reward_port):
    serve(port, lambda path, body: post(reward_port, path, **body), host=NODES["nodeb"])


def trainer(port):
    for step in range(10):
        post(port, "/score", host=NODES["nodeb"], step=step)


def on(node, role, *words):
    """Starts a role in the network of a node."""
    enter = ["nsenter", f"--net=/run/netns/{node}"]
    process = subprocess.Popen([*enter, sys.executable, __file__, role.__name__, *map(str, words)])
    tell(role.__name__, process.pid)
    return process


def sh(*words):
    subprocess.run(words, check=True)


def driver():
    tell("driver")
    for node in NODES:
        sh("ip", "netns", "add", node)
    try:
        sh(
            "ip",
            "link",
            "add",
            "va",
            "netns",
            "nodea",
            "type",
            "veth",
            "peer",
            "name",
            "vb",
            "netns",
            "nodeb",
        )
        for (node, address), link in zip(NODES.items(), ("va", "vb"), strict=True):
            sh("ip", "-n", node, "addr", "add", f"{address}/24", "dev", link)
            for one in (link, "lo"):
                sh("ip", "-n", node, "link", "set", one, "up")
        on("nodeb", reward, 7001)
        on("nodeb", router, 7002, 7001)
        on("nodea", trainer, 7002).wait()
    finally:
        for node in NODES:
            sh("ip", "netns", "del", node)


main(driver, reward, router, trainer)
