import os

# Threads that spin while they wait make a build several times slower as soon as anything else runs on the machine. Read when
# torch is first imported, so set before that.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "0")

from build_engines.cli import app

app(prog_name="python -m build_engines")
