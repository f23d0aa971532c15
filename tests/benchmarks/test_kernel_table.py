"""What tables of compiled kernels are made of: widths of accesses in PTX, and sections of a page."""

from pathlib import Path

from benchmarks.kernel_table import widths, write_section


def test_loads_and_stores_are_counted_by_width():
    ptx = """
    @%p1 ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];
    ld.global.b16 { %rs1 }, [ %rd2 + 0 ];
    ld.global.L1::evict_last.v2.b64 { %rd1, %rd2 }, [ %rd2 + 0 ];
    cp.async.cg.shared.global [ %r31 + 0 ], [ %rd3 + 0 ], 0x10, %r7;
    ld.shared.v4.b32 {%r1, %r2, %r3, %r4}, [%r9];
    @%p2 st.global.v4.b32 [ %rd4 + 0 ], { %r1, %r2, %r3, %r4 };
    st.global.b32 [ %rd4 + 0 ], { %r1 };
    st.shared.b32 [ %r9 + 0 ], %r1;
    """
    assert widths(ptx, "ld") == "16 B x 3, 2 B x 1"
    assert widths(ptx, "st") == "16 B x 1, 4 B x 1"


def test_a_section_of_a_page_is_replaced_and_the_others_stay(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text("# Page\n\nWords.\n")
    for title, body in (("One", "1"), ("Two", "2"), ("One", "11")):
        write_section(page, title, body)
    assert page.read_text() == "# Page\n\nWords.\n\n## One\n\n11\n\n## Two\n\n2\n"
