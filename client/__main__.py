from client.cli import app

app(prog_name="python -m client")
