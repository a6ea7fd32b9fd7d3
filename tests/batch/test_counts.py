def test_the_names_of_earlier_releases_still_work():
    assert (inlay.batch.Counts, inlay.batch.Job) == (inlay.batch.BatchCounts, inlay.batch.BatchJob)
