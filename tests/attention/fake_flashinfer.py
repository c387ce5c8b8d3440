"""FlashInfer's wrappers in plain torch, with its interface (0.6.14): for the code around its kernels, without a GPU.

Strict where the real ones are silent: a run without a plan, a plan on the device, or buffers that moved raise.
"""

from types import SimpleNamespace

import torch


class _Wrapper:
    def __init__(self, workspace, qo_indptr, kv_indptr, kv_indices, num_lists):
        assert workspace.dtype == torch.uint8
        assert kv_indptr.dtype == kv_indices.dtype == torch.int32 and len(kv_indptr) == num_lists + 1
        self.qo_indptr, self.kv_indptr, self.kv_indices = qo_indptr, kv_indptr, kv_indices
        self._int_workspace_buffer = torch.empty(8 << 20, dtype=torch.uint8)
        self._pin_memory_int_workspace_buffer = torch.empty(8 << 20, dtype=torch.uint8)
        self._plan_info = None
        self.num_plans = self.num_runs = 0

    def _plan(self, qo_indptr, indptr, indices, scale, *shape):
        assert indptr.device.type == "cpu" and indptr.dtype == torch.int32 and len(indptr) == len(self.kv_indptr)
        assert len(indices) == 0, "indices are in their buffer already"
        self.kv_indptr.copy_(indptr)
        if qo_indptr is not None:
            assert qo_indptr.device.type == "cpu" and qo_indptr.dtype == torch.int32
            self.qo_indptr.copy_(qo_indptr)
        # The real plan lies in this memory until the last layer has run.
        plan = torch.cat((self.kv_indptr, self.kv_indptr.new_full((1,), id(self) % 997)))
        self._int_workspace_buffer[: plan.nbytes].copy_(plan.view(torch.uint8))
        self.scale, self._plan_info = scale, [len(indptr), *shape]
        self.num_plans += 1

    def _run(self, q, k, v):
        """q [rows, h, d], k [slots, 1, hk, d], v [slots, 1, hk, dv] -> out, lse base e."""
        assert self._plan_info is not None, "no plan"
        planned = self._int_workspace_buffer[: self.kv_indptr.nbytes + 4].view(torch.int32)
        assert planned[-1] == id(self) % 997 and torch.equal(planned[:-1], self.kv_indptr), "another plan's memory"
        self.num_runs += 1
        indptr, outs, lses = planned[:-1].tolist(), [], []
        rows_each = len(q) // (len(indptr) - 1)
        for i, rows in enumerate(q.split(rows_each)):
            slots = self.kv_indices[indptr[i] : indptr[i + 1]].long()
            group = q.shape[1] // k.shape[2]
            keys, values = (x[slots, 0].repeat_interleave(group, 1) for x in (k, v))
            scores = torch.einsum("rhd,chd->rhc", rows, keys) * self.scale
            lse = scores.logsumexp(-1)
            outs.append(torch.einsum("rhc,chd->rhd", (scores - lse[..., None]).exp(), values))
            lses.append(lse)
        return torch.cat(outs), torch.cat(lses)


class BatchMLAPagedAttentionWrapper(_Wrapper):
    def __init__(self, float_workspace_buffer, use_cuda_graph, qo_indptr, kv_indptr, kv_indices, kv_len_arr, backend):
        assert use_cuda_graph and backend == "auto" and len(qo_indptr) == len(kv_len_arr) + 1
        super().__init__(float_workspace_buffer, qo_indptr, kv_indptr, kv_indices, len(kv_len_arr))

    def plan(
        self,
        qo_indptr,
        kv_indptr,
        kv_indices,
        kv_len_arr,
        num_heads,
        head_dim_ckv,
        head_dim_kpe,
        page_size,
        causal,
        sm_scale,
        q_data_type,
        kv_data_type,
    ):
        assert (head_dim_ckv, head_dim_kpe, page_size, causal) == (512, 64, 1, False)
        assert torch.equal(kv_len_arr, kv_indptr[1:] - kv_indptr[:-1]) and q_data_type == kv_data_type
        self._plan(qo_indptr, kv_indptr, kv_indices, sm_scale, num_heads)

    def run(self, q_nope, q_pe, ckv_cache, kpe_cache, return_lse, return_lse_base_on_e):
        assert return_lse and return_lse_base_on_e and ckv_cache.shape[1:] == (1, 512)
        k = torch.cat((ckv_cache, kpe_cache), -1)[:, :, None]
        return self._run(torch.cat((q_nope, q_pe), -1), k, k[..., :512])


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    def __init__(
        self,
        float_workspace_buffer,
        use_cuda_graph,
        use_tensor_cores,
        paged_kv_indptr_buffer,
        paged_kv_indices_buffer,
        paged_kv_last_page_len_buffer,
    ):
        num_lists = len(paged_kv_last_page_len_buffer)
        super().__init__(float_workspace_buffer, None, paged_kv_indptr_buffer, paged_kv_indices_buffer, num_lists)

    def plan(
        self,
        indptr,
        indices,
        last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim,
        page_size,
        *,
        sm_scale,
        q_data_type,
        kv_data_type,
    ):
        assert page_size == 1
        self._plan(None, indptr, indices, sm_scale, num_qo_heads, num_kv_heads, head_dim)

    def run(self, q, paged_kv_cache, return_lse):
        out, lse = self._run(q, *paged_kv_cache)
        return out, lse / 0.6931471805599453


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    def __init__(
        self,
        float_workspace_buffer,
        use_cuda_graph,
        qo_indptr_buf,
        paged_kv_indptr_buf,
        paged_kv_indices_buf,
        paged_kv_last_page_len_buf,
    ):
        num_lists = len(paged_kv_last_page_len_buf)
        super().__init__(float_workspace_buffer, qo_indptr_buf, paged_kv_indptr_buf, paged_kv_indices_buf, num_lists)

    def plan(
        self,
        qo_indptr,
        paged_kv_indptr,
        paged_kv_indices,
        paged_kv_last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim_qk,
        page_size,
        *,
        causal,
        sm_scale,
        q_data_type,
        kv_data_type,
    ):
        assert page_size == 1 and not causal
        self._plan(qo_indptr, paged_kv_indptr, paged_kv_indices, sm_scale, num_qo_heads, num_kv_heads, head_dim_qk)

    run = BatchDecodeWithPagedKVCacheWrapper.run


def package():
    """What `import flashinfer` gives."""
    return SimpleNamespace(
        mla=SimpleNamespace(BatchMLAPagedAttentionWrapper=BatchMLAPagedAttentionWrapper),
        BatchDecodeWithPagedKVCacheWrapper=BatchDecodeWithPagedKVCacheWrapper,
        BatchPrefillWithPagedKVCacheWrapper=BatchPrefillWithPagedKVCacheWrapper,
    )
