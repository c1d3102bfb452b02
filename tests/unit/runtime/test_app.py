import subprocess
import sys


def test_the_proxy_never_imports_torch() -> None:
    """Half a gigabyte of memory and a second of start-up that only handlers need."""
    script = (
        "import sys, runtime.app, runtime.server, runtime.invocation, runtime.settings\n"
        "runtime.app.create_app(runtime.settings.Settings())\n"
        "print(sorted({'torch', 'torchvision', 'PIL'} & set(sys.modules)))"
    )
    shown = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, check=True, text=True
    )
    assert shown.stdout == "[]\n"
