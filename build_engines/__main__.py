from build_engines.cli import app

app(prog_name="python -m build_engines")
