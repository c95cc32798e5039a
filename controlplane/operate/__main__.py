"""The programs behind the commands of this package, one process each."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path

from controlplane.env import SettingError, report_setting_errors
from controlplane.launcher.console import LauncherError, complain
from controlplane.launcher.installation import default_data, has_own_variables
from controlplane.operate.installation import Installation, Kind, find_installation

Run = Callable[[argparse.Namespace], int]


def main(words: list[str]) -> int:
    """Run one command; trouble is one line on standard error and status 1."""
    report_setting_errors()
    options = build_parser().parse_args(words)
    try:
        return int(options.run(options))
    except (LauncherError, SettingError) as error:
        complain(str(error))
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever read it has enough
        sys.stdout = None
        return 0


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="muster")
    commands = parser.add_subparsers(required=True)

    def add(name: str, text: str, run: Run) -> argparse.ArgumentParser:
        command = commands.add_parser(name, description=text)
        command.set_defaults(run=run)
        where = "directory of the installation (default: %(default)s); DATABASE_URL with MUSTER_SECRET_KEY takes its place"
        command.add_argument("--data", type=Path, default=default_data(), metavar="DIR", help=where)
        return command

    text = "Write the database, and keys and settings under a passphrase, into one file. Nothing has to stop."
    backup = add("backup", text, _run_backup)
    restore = add("restore", "Bring a backup back into an empty database, with every process stopped.", _run_restore)
    for command in (backup, restore):
        command.add_argument("file", type=Path, metavar="FILE")
        told = "file that holds the passphrase (default: it is asked for)"
        command.add_argument("--passphrase-file", type=Path, metavar="FILE", help=told)
    restore.add_argument("--replace", action="store_true", help="delete what is in the database; its name has to be typed")
    restore.add_argument("--confirm", default="", metavar="NAME", help="with --replace: the name, where nobody can be asked")
    restore.add_argument("--settings", type=Path, metavar="OUT", help="only write the settings of the backup into this file")
    text = "Show what runs, how each part stands, nodes, and what needs attention. Status 0: well, 1: look, 3: it does not run."
    status = add("status", text, _run_status)
    text = "Look at everything that an installation stands on, and say what to do. Status 1: something failed."
    doctor = add("doctor", text, _run_doctor)
    for command in (status, doctor):
        command.add_argument("--json", action="store_true", dest="as_json", help="print it for a program")
    logs = add("logs", "Show the logs of the parts: the files of up, or the journal.", _run_logs)
    logs.add_argument("part", nargs="?", default="", metavar="PART", help="control, gateway, worker, node, postgres, valkey")
    logs.add_argument("-f", "--follow", action="store_true", help="go on with what comes")
    logs.add_argument("-n", "--lines", type=int, default=0, metavar="N", help="so many lines of the end")
    add("version", "Show the release of this program, and of what runs.", _run_version)
    upgrade = add("upgrade", "Say what an upgrade to this release would do.", _run_upgrade)
    upgrade.add_argument("--check", action="store_true", required=True, help="look only; restarting the parts upgrades them")
    chat = add("chat", "Talk to a model through the gateway.", _run_chat)
    chat.add_argument("model", nargs="?", default="", metavar="MODEL", help="default: the first that the key may use")
    chat.add_argument("--url", default="", help="of a gateway (default: MUSTER_BASE_URL, or that of the installation)")
    chat.add_argument(
        "--key-file", type=Path, metavar="FILE", help="holds an API key (default: MUSTER_API_KEY, or the first key)"
    )
    return parser


def _run_status(options: argparse.Namespace) -> int:
    from controlplane.operate.status import run_status

    return run_status(find_installation(options.data), as_json=options.as_json)


def _run_doctor(options: argparse.Namespace) -> int:
    from controlplane.operate.doctor import run_doctor

    return run_doctor(find_installation(options.data), as_json=options.as_json)


def _run_logs(options: argparse.Namespace) -> int:
    from controlplane.operate.logs import LogOptions, run_logs

    # Without its environment: a folder has logs also while it starts.
    return run_logs(
        Installation(Kind.SERVICES if has_own_variables(os.environ) else Kind.STOPPED, options.data.resolve(), {}),
        LogOptions(options.part, follow=options.follow, lines=options.lines),
    )


def _run_version(options: argparse.Namespace) -> int:
    from controlplane.operate.upgrade import run_version

    return run_version(find_installation(options.data))


def _run_upgrade(options: argparse.Namespace) -> int:
    from controlplane.operate.upgrade import run_check

    return run_check(find_installation(options.data))


def _run_chat(options: argparse.Namespace) -> int:
    from controlplane.operate.chat import run_chat

    return run_chat(options.data.resolve(), url=options.url, key_file=options.key_file, model=options.model)


def _run_backup(options: argparse.Namespace) -> int:
    from controlplane.operate.backup import ask_passphrase, run_backup

    installation = find_installation(options.data)
    return run_backup(installation, options.file.absolute(), ask_passphrase(options.passphrase_file, is_new=True))


def _run_restore(options: argparse.Namespace) -> int:
    from controlplane.operate.backup import RestoreOptions, ask_passphrase, run_restore

    chosen = RestoreOptions(options.file, replace=options.replace, confirm=options.confirm, settings=options.settings)
    return run_restore(find_installation(options.data), chosen, lambda: ask_passphrase(options.passphrase_file, is_new=False))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
