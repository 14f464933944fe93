"""What is read from the sources."""

from pathlib import Path

from tinyllm.trace.explain.sources import Module, modules

SOURCE = '''
class Owner:
    def forward(self, x):
        """Not self.said(x), which only stands here."""
        # nor self.remarked(x)
        return self.called(self.text("self.quoted(x)")) + self.items[0](x) + self.read.weight
'''


def test_a_module_is_called_where_the_code_calls_it(tmp_path: Path):
    """A comment, a docstring or a string that looks like a call is none."""
    file = tmp_path / "owner.py"
    file.write_text(SOURCE, encoding="utf-8")
    names = ("called", "text", "said", "remarked", "quoted", "items", "read")
    called = [name for name in names if Module(name, "Linear", "Owner", file, 1, {}).is_called]
    assert called == ["called", "text"]


def test_the_model_s_own_parts():
    called = {module.name: module.is_called for module in modules()}
    assert called["qkv_proj"] and called["mlp"] and not called["layers"] and not called["lm_head"]
