"""Forms: how layouts are told in JSON where thousands of tensors share a few meshes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from distcore.v1 import Layout, MeshForm, PlanError, Problem, describe_layout, layout_from


class Forms:
    """The different forms of many layouts, each told once.

    The form of a layout is its description without shape and dtype.
    """

    def __init__(self) -> None:
        self._found: list[dict[str, object]] = []
        self._by_mesh: dict[MeshForm, int] = {}
        self._by_text: dict[str, int] = {}

    def number(self, layout: Layout) -> int:
        """The place of the layout's form among all so far."""
        made = layout.form
        number = None if made is None else self._by_mesh.get(made)
        if number is not None:
            return number
        form = describe_layout(layout)
        del form["shape"], form["dtype"]
        number = self._by_text.setdefault(str(form), len(self._found))
        if number == len(self._found):
            self._found.append(form)
        if made is not None:
            self._by_mesh[made] = number
        return number

    def told(self) -> list[dict[str, object]]:
        """The forms in the order of their numbers, as JSON data."""
        return list(self._found)


class FormReader:
    """Makes layouts of forms that were read; equal layouts are one object."""

    def __init__(self, forms: object) -> None:
        if not isinstance(forms, list) or not all(isinstance(form, Mapping) for form in forms):
            raise PlanError(Problem("forms", "type", "not a list of objects"))
        self._forms: list[Mapping[str, object]] = forms
        self._known: dict[tuple[object, ...], Layout] = {}

    def layout(self, shape: Sequence[int], dtype: str, number: int) -> Layout:
        """The layout of a tensor by its shape, its dtype and the number of its form."""
        if not 0 <= number < len(self._forms):
            text = f"there is no form {number} among {len(self._forms)}"
            raise PlanError(Problem("forms", "range", text))
        place = (tuple(shape), dtype, number)
        layout = self._known.get(place)
        if layout is None:
            described = {**self._forms[number], "shape": list(shape), "dtype": dtype}
            layout = self._known[place] = layout_from(described)
        return layout
