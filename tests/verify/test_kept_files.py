"""What a verified script does to files stays in a temporary folder, and the script sees it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.python_path import python_path

#: Runs each program of a list in a process and a project of its own.
RUNNER = """\
import glob, json, os, shutil, sys, tempfile, traceback
from pathlib import Path
import torch
from accelerate.guests.scripts.verify.kept_files import keep_files


def run(project, folder, program):
    folder.mkdir(parents=True)
    tempfile.tempdir = str(folder.parent)
    os.chdir(project)
    keep_files(folder)
    exec(compile(program, "program.py", "exec"), {**globals(), "__name__": "__main__"})


for name, (project, folder, program) in json.loads(sys.stdin.read()).items():
    if os.fork() == 0:
        with open(folder + ".log", "w") as log:
            os.dup2(log.fileno(), 1)
            try:
                run(project, Path(folder) / "run_1", program)
            except BaseException:
                traceback.print_exc(file=sys.stdout)
            sys.stdout.flush()
        os._exit(0)
    os.wait()
"""


def files_of(folder: Path) -> dict[str, object]:
    """Return what there is in a folder; a file that came and went has changed the time of its folder."""
    found: dict[str, object] = {}
    for path in (folder, *sorted(folder.rglob("*"))):
        status = path.lstat()
        content = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else b""
        found[str(path.relative_to(folder))] = (status.st_mode, status.st_mtime_ns, status.st_ino, content)
    return found


def make_project(folder: Path) -> None:
    (folder / "old" / "deep").mkdir(parents=True)
    for name in ("a.txt", "b.txt", "c.txt", "old/d.txt", "old/deep/e.txt"):
        (folder / name).write_text(name)
    (folder / "link").symlink_to("a.txt")
    (folder / "newest").symlink_to("old")
    (folder / "far").symlink_to(folder / "newest" / "deep")
    (folder / "ring").symlink_to("ring")
    (folder / "broken").symlink_to("nowhere/file")


#: What a script may do to its files, and what it must see then.
_TEXT = """\
## open_to_write
open('a.txt', 'w').write('new')
assert open('a.txt').read() == 'new'
## open_to_append
open('a.txt', 'a').write('+')
assert open('a.txt').read() == 'a.txt+'
## open_to_change
f = open('a.txt', 'r+')
f.write('A')
f.close()
assert open('a.txt').read() == 'A.txt'
## open_exclusively
open('new', 'x').write('1')
try:
    open('a.txt', 'x')
except FileExistsError:
    pass
else:
    raise SystemExit('not refused')
assert open('a.txt').read() == 'a.txt'
## open_in_a_new_folder
os.makedirs('x/y/z')
open('x/y/z/f', 'wb').write(b'1')
assert os.listdir('x/y') == ['z']
## os_open
f = os.open('a.txt', os.O_WRONLY | os.O_CREAT)
os.write(f, b'B')
os.close(f)
assert open('a.txt').read() == 'B.txt'
f = os.open('b.txt', os.O_WRONLY | os.O_TRUNC)
os.close(f)
assert os.path.getsize('b.txt') == 0
f = os.open('n.txt', os.O_RDWR | os.O_CREAT | os.O_EXCL)
os.close(f)
assert os.path.exists('n.txt')
## path_write
Path('a.txt').write_text('p')
Path('n').write_bytes(b'1')
assert Path('a.txt').read_text() == 'p'
## path_touch
Path('a.txt').touch()
Path('t').touch()
assert Path('t').exists()
## path_methods
Path('d').mkdir()
Path('a.txt').rename('d/a')
Path('b.txt').unlink()
Path('d/a').replace('d/b')
assert Path('d/b').read_text() == 'a.txt' and (not Path('b.txt').exists()) and (not Path('d/a').exists())
## os_replace
open('t', 'w').write('t')
os.replace('t', 'a.txt')
assert open('a.txt').read() == 't' and (not os.path.exists('t'))
## os_replace_of_old_ones
os.replace('b.txt', 'a.txt')
assert open('a.txt').read() == 'b.txt' and (not os.path.exists('b.txt'))
## os_rename
os.rename('old', 'moved')
assert open('moved/deep/e.txt').read() == 'old/deep/e.txt'
assert not os.path.exists('old/d.txt')
open('moved/deep/e.txt', 'a').write('+')
os.renames('moved/d.txt', 'n/d')
## os_remove
os.remove('a.txt')
os.unlink('b.txt')
assert not os.path.exists('a.txt')
try:
    open('a.txt')
except FileNotFoundError:
    pass
else:
    raise SystemExit('still there')
open('a.txt', 'w').write('again')
assert open('a.txt').read() == 'again'
## os_rmdir
os.mkdir('m')
os.rmdir('m')
assert not os.path.isdir('m')
try:
    os.rmdir('old')
except OSError:
    pass
else:
    raise SystemExit('not empty')
assert os.path.exists('old/d.txt')
## rmtree
shutil.rmtree('old')
assert not os.path.exists('old/deep/e.txt')
os.mkdir('old')
assert os.listdir('old') == [] and (not os.path.exists('old/d.txt'))
## rmtree_of_new_ones
os.makedirs('x/y')
shutil.rmtree('x')
shutil.rmtree('none', ignore_errors=True)
## copies
shutil.copy('a.txt', 'b.txt')
shutil.copy2('a.txt', 'n.txt')
shutil.copyfile('c.txt', 'old/d.txt')
shutil.copytree('old', 'copied')
shutil.copy2('n.txt', 'm.txt')
assert [open(n).read() for n in ('b.txt', 'm.txt', 'copied/d.txt')] == ['a.txt', 'a.txt', 'c.txt']
## moves
shutil.move('a.txt', 'old')
shutil.move('old/deep', 'deep')
assert open('old/a.txt').read() == 'a.txt' and os.listdir('deep') == ['e.txt']
## links
os.symlink('a.txt', 'latest')
assert open('latest').read() == 'a.txt' and os.path.islink('latest')
open('latest', 'w').write('through')
assert open('a.txt').read() == 'through'
os.unlink('latest')
assert open('a.txt').read() == 'through'
os.unlink('link')
os.link('b.txt', 'hard')
Path('l2').symlink_to('old')
open('l2/d.txt', 'w').write('L')
assert open('old/d.txt').read() == 'L'
## an_old_link
open('link', 'w').write('x')
assert open('link').read() == open('a.txt').read() == 'x' and os.path.islink('link')
open('a.txt', 'a').write('y')
assert open('link').read() == 'xy'
## old_links_to_folders
open('newest/n', 'w').write('1')
open('old/deep/e.txt', 'w').write('2')
assert open('old/n').read() == '1' and open('far/e.txt').read() == open('newest/deep/e.txt').read() == '2'
assert sorted(os.listdir('newest')) == ['d.txt', 'deep', 'n'] and os.listdir('far') == ['e.txt']
os.makedirs('far/x')
os.remove('newest/d.txt')
assert os.path.isdir('old/deep/x') and not os.path.exists('old/d.txt')
assert os.path.islink('newest') and os.readlink('newest') == 'old' and os.path.samefile('newest', 'old')
shutil.copytree('newest', 'copied')
assert sorted(os.listdir('copied')) == ['deep', 'n']
## old_links_are_replaced
os.unlink('newest')
assert not os.path.lexists('newest') and os.path.exists('old/d.txt')
os.symlink('old/deep', 'newest')
open('newest/n', 'w').write('1')
assert open('old/deep/n').read() == '1' and os.path.islink('newest')
os.rename('link', 'moved')
open('b.txt', 'w').write('2')
os.symlink('b.txt', 'next')
os.replace('next', 'link')
assert open('link').read() == '2' and open('moved').read() == 'a.txt' and os.path.islink('moved')
## links_to_nowhere
for path in ('ring', 'ring/file', 'broken', 'broken/file'):
    try:
        open(path)
    except OSError:
        pass
    else:
        raise SystemExit(path)
os.unlink('ring')
os.mkdir('ring')
os.mkdir('nowhere')
open('broken', 'w').write('1')
assert open('nowhere/file').read() == '1' and os.listdir('ring') == []
## attributes
os.utime('a.txt', (1, 1))
os.chmod('b.txt', 384)
os.truncate('c.txt', 1)
assert os.stat('a.txt').st_mtime == 1 and os.path.getsize('c.txt') == 1
os.utime('old')
os.chmod('old', 448)
## named_temporary_file
f = tempfile.NamedTemporaryFile('w', dir='.', delete=False)
f.write('n')
f.close()
os.replace(f.name, 'a.txt')
assert open('a.txt').read() == 'n'
with tempfile.TemporaryDirectory(dir='.') as d:
    open(os.path.join(d, 'f'), 'w').write('1')
with tempfile.TemporaryFile(dir='.') as f:
    f.write(b'1')
## listings
open('old/n.txt', 'w').write('1')
os.remove('old/d.txt')
assert sorted(os.listdir('old')) == ['deep', 'n.txt']
assert sorted((p.name for p in Path('old').iterdir())) == ['deep', 'n.txt']
assert sorted((p.name for p in Path('.').glob('old/*.txt'))) == ['n.txt']
assert sorted((p.name for p in Path('.').rglob('*.txt'))) == ['a.txt', 'b.txt', 'c.txt', 'e.txt', 'n.txt']
found = glob.glob('old/**/*.txt', recursive=True)
assert sorted(map(os.path.basename, found)) == ['e.txt', 'n.txt']
assert [sorted(f) for _, _, f in os.walk('old')] == [['n.txt'], ['e.txt']]
with os.scandir('old') as found:
    assert {e.name: e.is_dir(follow_symlinks=False) for e in found} == {'deep': True, 'n.txt': False}
## paths_of_listings
open('old/n', 'w').write('1')
for e in list(os.scandir('old')):
    if e.is_file():
        open(e.path, 'w').write('2')
assert open('old/n').read() == open('old/d.txt').read() == '2'
## a_working_folder
os.makedirs('run')
os.chdir('run')
open('f', 'w').write('1')
open('../a.txt', 'w').write('2')
assert os.path.basename(os.getcwd()) == 'run'
os.chdir('..')
assert open('a.txt').read() == '2'
os.chdir('old')
open('d.txt', 'w').write('3')
assert open('../old/d.txt').read() == '3'
## torch_files
import torch
torch.save({'w': torch.ones(2)}, 'a.txt')
assert torch.load('a.txt')['w'].sum() == 2
torch.save(obj=1, f=Path('m.pt'))
torch.load('m.pt')
torch.jit.save(torch.jit.script(torch.nn.ReLU()), 'j.pt')
torch.jit.load('j.pt')
from safetensors.torch import load_file, save_file
save_file({'w': torch.ones(2)}, 'b.txt')
assert load_file('b.txt')['w'].sum() == 2
## other_writers
import csv, logging, zipfile, tarfile, numpy
logging.FileHandler('a.txt', 'w').emit(logging.LogRecord('n', 20, 'p', 1, 'm', (), None))
zipfile.ZipFile('z.zip', 'w').writestr('f', '1')
tarfile.open('t.tar', 'w').add('b.txt')
numpy.save('b.txt', [1])
numpy.zeros(2).tofile('c.txt')
shutil.make_archive('archive', 'zip', 'old')
assert os.path.getsize('archive.zip')
## bytes
open(b'a.txt', 'w').write('1')
os.mkdir(b'm')
assert b'm' in os.listdir(b'.')
os.rename(b'b.txt', b'm/b')
## errors
try:
    open('none/f', 'w')
except FileNotFoundError:
    pass
else:
    raise SystemExit('no folder')
try:
    os.mkdir('old')
except FileExistsError:
    pass
else:
    raise SystemExit('there is one')
try:
    os.remove('old')
except OSError:
    pass
else:
    raise SystemExit('a folder')
assert os.path.exists('old/d.txt')
## other_programs
open('old/n', 'w').write('1')
os.system('true')
open(os.devnull, 'w').write('1')
"""
DONE = {name: program for name, _, program in (part.partition("\n") for part in _TEXT.split("## ")[1:])}


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each program printed, and how its project changed; all run from one process, which imports torch once."""
    folder = tmp_path_factory.mktemp("kept_files")
    projects = {name: folder / f"project_{name}" for name in DONE}
    for project in projects.values():
        make_project(project)
    before = {name: files_of(project) for name, project in projects.items()}
    given = {name: (str(projects[name]), str(folder / f"run_{name}"), program) for name, program in DONE.items()}
    environment = {**os.environ, "PYTHONPATH": python_path()}
    command = [sys.executable, "-c", RUNNER]
    done = subprocess.run(
        command, input=json.dumps(given), env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = {name: (folder / f"run_{name}.log").read_text() for name in DONE}
    for name, project in projects.items():
        after = files_of(project)
        found[name] += "".join(
            f"changed: {path}\n" for path in {**after, **before[name]} if after.get(path) != before[name].get(path)
        )
    return found


@pytest.mark.parametrize("name", DONE)
def test_what_a_script_does_to_its_files_is_seen_by_it_alone(name: str, reports: dict[str, str]) -> None:
    assert not reports[name], reports[name]
