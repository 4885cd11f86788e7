"""Functions of C++ and CUDA headers, as callers of other files meet them."""

import time
from collections.abc import Callable

import pytest
from ast_grep_py import SgRoot

from harness.stages.isolation.detectors.cpp_definitions import (
    Accepting,
    CppFunction,
    Overloads,
    cpp_functions,
)


def _functions(text: str) -> Overloads:
    return cpp_functions(SgRoot(text, "cpp").root())


def test_a_function_is_read_without_names_of_parameters() -> None:
    found = _functions("namespace a {\nvoid norm(T* __restrict__ out, const T* in, float eps = 1e-5f);\n}\n")

    assert found == {"a::norm": [CppFunction(2, ("T*", "const T*", "float"), (None, None, "1e-5f"))]}


def test_what_no_other_file_can_call_is_left_out() -> None:
    text = (
        "static int a(int n);\n"
        "namespace { int b(int n); }\n"
        "class C { int c(int n); protected: void d(); };\n"
        "struct D { private: int e(); };\n"
        "inline void f() { int g(3); auto h = [](int x) { return x; }; }\n"
    )

    assert list(_functions(text)) == ["f"]


def test_public_members_and_operators_are_read() -> None:
    text = (
        "class C { public: explicit C(int x); bool operator==(const C& o) const; };\n"
        "struct D { void e(...); };\n"
    )

    assert {name: [f.types for f in overloads] for name, overloads in _functions(text).items()} == {
        "C::C": [("int",)],
        "C::operator==": [("const C&",)],
        "D::e": [("...",)],
    }


def test_calls_fit_a_further_parameter_with_a_default_and_an_overload() -> None:
    before = _functions("void f(int a, float b = 1);")["f"][0]

    assert Accepting(_functions("void f(int x, float y = 2, int z = 0);")["f"]).accepts(before)
    assert Accepting(_functions("void f(long a); void f(int a, float b = 1);")["f"]).accepts(before)


def test_calls_do_not_fit_another_type_or_a_default_that_is_gone() -> None:
    before = _functions("void f(int a, float b = 1);")["f"][0]

    assert not Accepting(_functions("void f(int a, float b);")["f"]).accepts(before)
    assert not Accepting(_functions("void f(long a, float b = 1);")["f"]).accepts(before)
    assert not Accepting(_functions("void f(int a);")["f"]).accepts(before)


def _long_class(members: int) -> str:
    return "class C { public:\n" + "".join(f"void m{n}(int a = {n});\n" for n in range(members)) + "};\n"


def _overloaded(members: int) -> str:
    return "".join(f"void f(T{n} a);\n" for n in range(members))


@pytest.mark.parametrize("text", [_long_class, _overloaded], ids=["members", "overloads"])
def test_time_grows_with_the_file_and_no_faster(text: Callable[[int], str]) -> None:
    def took(members: int) -> float:
        begun = time.process_time()
        for overloads in (found := _functions(text(members))).values():
            assert all(map(Accepting(overloads).accepts, overloads))
        assert sum(map(len, found.values())) == members
        return time.process_time() - begun

    least = min(took(500) for _ in range(3))
    assert took(4000) < 8 * 2.5 * least  # eight times as much; squares would take sixty-four
