"""A sparse mixture: a router sends each token to two experts of a list, and an expert that nobody chose does not run."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Expert(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.w1 = nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class SparseMoE(nn.Module):
    def __init__(self, dim, hidden, num_experts, top_k):
        super().__init__()
        self.num_experts, self.top_k = num_experts, top_k
        self.gate = nn.Linear(dim, num_experts, bias=False)
        self.experts = nn.ModuleList([Expert(dim, hidden) for _ in range(num_experts)])

    def forward(self, x):
        shape = x.shape
        x = x.view(-1, shape[-1])
        weights, selected = torch.topk(F.softmax(self.gate(x), dim=-1), self.top_k, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        results = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            token, nth = torch.where(selected == i)
            if token.numel() == 0:
                continue
            results.index_add_(0, token, expert(x[token]) * weights[token, nth, None])
        return results.view(shape)


class Block(nn.Module):
    def __init__(self, dim, heads, hidden, num_experts, top_k):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attn = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.norm2 = nn.LayerNorm(dim)
        self.moe = SparseMoE(dim, hidden, num_experts, top_k)

    def forward(self, x, mask):
        y = self.norm1(x)
        x = x + self.attn(y, y, y, attn_mask=mask, need_weights=False)[0]
        return x + self.moe(self.norm2(x))


class MoELanguageModel(nn.Module):
    def __init__(self, vocab=19, dim=12, heads=2, layers=3, hidden=16, num_experts=6, top_k=2, max_len=16):
        super().__init__()
        self.tok = nn.Embedding(vocab, dim)
        self.pos = nn.Parameter(torch.randn(1, max_len, dim) * 0.02)
        self.blocks = nn.ModuleList([Block(dim, heads, hidden, num_experts, top_k) for _ in range(layers)])
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)
        nn.init.trunc_normal_(self.head.weight, std=0.02)

    def forward(self, input_ids):
        length = input_ids.size(1)
        x = self.tok(input_ids) + self.pos[:, :length]
        mask = torch.triu(torch.full((length, length), float("-inf"), device=x.device, dtype=x.dtype), diagonal=1)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))
