from techniques.cp.on_ranks import remembered


def test_x(ranks):
    one, other = ranks.run(remembered, 2, "cp=2")
    print(
        "KEPT",
        [len(one), one[0][0], one[0][1] == other[0][1], one[1][1] == other[1][1], one[0][1][:6], other[0][1][:6]],
    )
    assert 0
