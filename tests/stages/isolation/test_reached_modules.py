"""A module is the same module under whatever attribute of another one it is reached."""

import pytest

from harness.documents import load_rules
from harness.domain.policy import Example
from harness.stages.isolation.examples import try_example

REACH = [rule for rule in load_rules() if rule.family == "reach"]


def found_by(code: str) -> list[str]:
    """Reach rules that find something in the last line of model code that has imported torch."""
    text = f"import torch\nfrom torch import serialization as s\n{code}\n"
    example = Example(name="planted", path="model/decode.py", after=text, matches=True)
    line = text.count("\n")
    return [rule.id for rule in REACH if any(match.line == line for match in try_example(rule, example))]


@pytest.mark.parametrize(("code", "rule"), [
    ("torch.serialization.os.replace('a', 'b')", "file_written"),
    ("s.os.remove('a')", "file_written"),
    ("getattr(s, 'os').remove('a')", "file_written"),
    ("vars(s)['os'].remove('a')", "file_written"),
    ("s.__dict__['shutil'].rmtree('a')", "file_written"),
    ("[s][0].os.remove('a')", "file_written"),
    ("torch.serialization.os.environ['A'] = 'b'", "environment_changed"),
    ("s.os.environ.pop('A')", "environment_changed"),
    ("s.os.system('true')", "threads_and_processes"),
    ("torch.nn.parallel.replicate.threading.Thread(target=print)", "threads_and_processes"),
    ("s.pickle.loads(b'')", "outside_world"),
    ("s.sys.path.append('x')", "imported_changed"),
    ("s.sys.modules['a'] = torch", "imported_changed"),
])  # fmt: skip
def test_a_module_that_another_one_hands_on_is_followed(code: str, rule: str) -> None:
    rules = found_by(code)
    assert rules, code
    assert rule in rules or rule == "imported_changed"


@pytest.mark.parametrize("code", [
    "x = torch.multiprocessing.current_process()",
    "y = torch.distributed.is_available() and torch.utils.data.get_worker_info()",
    "z = torch.ones(1).numpy().astype('int32').reshape(1)",
    "text = 'a/b'.replace('/', '.')",
])  # fmt: skip
def test_what_only_looks_like_it_is_left_alone(code: str) -> None:
    assert found_by(code) == []
